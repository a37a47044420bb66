"""Ranks the findings of a profile.

Wrong results come first, then memory that grows with every step. The rest are sorted by severity, then by
predicted speed-up; findings without a prediction come last within their severity. If several rules report one
problem, only the narrowest rule is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

ORDER = [severity.value for severity in Severity]
# A wide rule and the narrower rules that replace it: anywhere in the step, and at the same lines only.
OF_THE_STEP = {
    "tiny_operators": ("host_sync_every_step", "data_wait", "slow_fetch", "python_between"),
    "layout_copies": (
        "data_wait",
        "slow_fetch",
        "loader_made_in_loop",
        "tiny_operators",
        "logging_cost",
        "slowing_down",
        "python_between",
    ),
    "host_growth": ("leak", "loss_kept_with_graph", "slowing_down", "recompiles"),
    "collecting_garbage": ("host_growth",),  # the collector walks the objects that pile up
    "thread_count": ("too_many_workers",),
    "graph_breaks": ("recompiles",),
    "eval_without_no_grad": ("train_mode_not_restored",),
}
OF_THE_LINE = {
    "python_between": (
        "logging_cost",
        "gc_collect_every_step",
        "host_sync_every_step",
        "data_parallel_used",
        "empty_cache_every_step",
        "slowing_down",
        "eval_without_no_grad",
        "leak",
    ),
    "layout_copies": ("leak", "host_sync_every_step"),
    "host_sync_every_step": ("logging_cost",),
    "leak": ("slowing_down",),
    "slow_fetch": ("host_growth",),
}
NEAR = 3  # lines
# Rules about any line, or about what matters only on some machines. Within a severity they come after the rules
# about the loop that trains, whose problems act in every step or epoch.
AFTER_THE_LOOP = {
    "call_without_parentheses",
    "context_thrown_away",
    "result_thrown_away",
    "iterator_used_up",
    "parameters_used_up",
    "bias_before_batchnorm",
    "data_parallel_used",
    "memory_filled_for_nothing",
}
# An evaluation with graphs takes memory as a training step does, and time. It comes before wasted time alone.
WHOLE_BATCH = ("eval_without_no_grad",)
# Rules of memory that grows with every step. It ends the run, so they come before wasted time.
GROWTH = ("loss_kept_with_graph", "loader_cycled", "tensor_as_key", "leak", "host_growth")


def judge(profile: ProfileRecord, table: Iterable[Rule]) -> list[Finding]:
    """All findings of the table's rules in a profile, ranked. An error in a rule is raised."""
    return ranked([finding for rule in table if rule.judge is not None for finding in rule.judge(profile)])


def placed(findings: Iterable[Finding], table: Iterable[Rule], program: ScriptProgram) -> None:
    """Give measured findings the line of their cause, where the same rule finds it in the source.

    A measurement of a wrong result knows the step, but not the cause. Other findings keep their line.
    """
    looks = {rule.code: rule.look for rule in table if rule.look is not None}
    for finding in findings:
        if finding.rule in looks and (finding.place is None or finding.severity == Severity.WRONG.value):
            causes = [seen.place for seen in looks[finding.rule](program) if seen.place is not None]
            if causes:
                finding.others = [*causes[1:], *([finding.place] if finding.place else []), *finding.others]
                finding.place = causes[0]


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    kept = [finding for finding in findings if not any(_says_it_better(finding, other) for other in findings)]
    return sorted(
        kept,
        key=lambda f: (
            ORDER.index(Severity.WRONG if f.name in GROWTH else f.severity),
            f.name in GROWTH,
            -(f.predicted.median if f.predicted else 0.0),
            f.rule,
        ),
    )


def _says_it_better(wide: Finding, other: Finding) -> bool:
    if other.name in OF_THE_STEP.get(wide.name, ()):
        return True
    return other.name in OF_THE_LINE.get(wide.name, ()) and (
        wide.place is None
        or any(
            place.file == wide.place.file and abs(place.line - wide.place.line) <= NEAR
            for place in (other.place, *other.others)
            if place is not None
        )
    )
