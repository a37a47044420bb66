"""Explains a failure with the first kind that recognises it.

A failure that no kind recognises stays unknown; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flatout.diagnose.failures import TABLE, loading, symptoms
from flatout.diagnose.kind import FailureKind
from flatout.diagnose.tracebacks import clean, read, unfolded
from flatout.schema.errors import MALFORMED
from flatout.schema.failure import FailureRecord
from flatout.schema.findings import Finding

MOST_LINES = 3


@dataclass
class Explanation:
    """One explanation and the ranks it applies to."""

    finding: Finding
    ranks: list[int] = field(default_factory=list)


def explain(failure: FailureRecord, table: Sequence[FailureKind] = TABLE) -> Finding | None:
    """The explanation of one failure, or None. Kinds that only report another process's failure come last."""
    whole = replace(failure, chain=[part for thrown in failure.chain for part in unfolded(thrown)])
    for one in sorted(table, key=lambda kind: kind.reports):
        try:
            finding = one.explain(whole)
        except MALFORMED:
            continue  # the message is close to a known one but does not parse, so the failure stays unknown
        if finding is not None:
            return _cleaned(finding)
    return None


def explain_text(text: str) -> list[Explanation]:
    """Explanations of a pasted error or a log, causes before consequences. Empty if nothing is recognised.

    A log without a known failure may still show a loss that is NaN.
    """
    explanations: list[Explanation] = []
    for failure in read(text):
        finding = explain(failure)
        if finding is None:
            continue
        same = next(
            (
                one
                for one in explanations
                if (one.finding.rule, one.finding.place) == (finding.rule, finding.place)
            ),
            None,
        )
        if same is None:
            same = Explanation(finding)
            explanations.append(same)
        if failure.rank is not None and failure.rank not in same.ranks:
            same.ranks.append(failure.rank)
    if not explanations and (symptom := symptoms.of_log(text.split("\n"))) is not None:
        return [Explanation(_cleaned(symptom))]
    reports = {kind.code for kind in TABLE if kind.reports}
    if any(one.finding.rule == loading.no_main_guard.code for one in explanations):
        reports.add(loading.worker_ended.code)  # it started the script again, and ended there
    first = [one for one in explanations if one.finding.rule not in reports]
    return (first or explanations)[:MOST_LINES]


def _cleaned(finding: Finding) -> Finding:
    """The finding without terminal control sequences in names and messages of the user's program."""
    place = finding.place and replace(
        finding.place,
        file=clean(finding.place.file),
        function=clean(finding.place.function),
        text=clean(finding.place.text),
    )
    return replace(
        finding,
        message=_line(finding.message),
        fix="\n".join(clean(line) for line in finding.fix.split("\n")),
        place=place,
        evidence=[_line(line) for line in finding.evidence],
    )


def _line(text: str) -> str:
    return " ".join(clean(text).split())[:600]


def lines(finding: Finding, ranks: Sequence[int] = ()) -> list[str]:
    """The explanation as lines for the user: cause, place, evidence, fix, page."""
    who = (
        f"rank {', '.join(map(str, sorted(ranks)))}: "
        if ranks and not finding.message.startswith("rank ")
        else ""
    )
    shown = [f"{who}{finding.message}."]
    if finding.place:
        shown.append(
            f"  at     {finding.place.sentence()}"
            + (f": {finding.place.text[:160]}" if finding.place.text else "")
        )
    shown += [f"  {'' if number else 'seen':6} {line}" for number, line in enumerate(finding.evidence)]
    shown += [
        f"  {'' if number else 'fix':6} {line}" for number, line in enumerate(finding.fix.split("\n")) if line
    ]
    shown.append(f"  more   flatout explain {finding.rule}")
    return shown
