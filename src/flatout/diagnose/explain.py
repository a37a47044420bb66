"""Explains a failure with the first kind that recognises it.

A failure that no kind recognises stays unknown; nothing is guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flatout.agent.failure_details import record_failure
from flatout.diagnose.failures import TABLE, loading, symptoms
from flatout.diagnose.kind import FailureKind
from flatout.diagnose.tracebacks import clean, read_failures, split_nested
from flatout.schema.errors import MALFORMED
from flatout.schema.failure import FailureRecord
from flatout.schema.findings import Finding

MAX_EXPLANATIONS = 3


@dataclass
class Explanation:
    """One explanation and the ranks it applies to."""

    finding: Finding
    ranks: list[int] = field(default_factory=list)


def explain(failure: FailureRecord, table: Sequence[FailureKind] = TABLE) -> Finding | None:
    """The explanation of one failure, or None. Secondary kinds come last."""
    expanded = replace(failure, chain=[part for error in failure.chain for part in split_nested(error)])
    for kind in sorted(table, key=lambda kind: kind.secondary):
        try:
            finding = kind.explain(expanded)
        except MALFORMED:
            continue  # the message is close to a known one but does not parse, so the failure stays unknown
        if finding is not None:
            return _sanitized(finding)
    return None


def explain_text(text: str) -> list[Explanation]:
    """Explanations of a pasted error or a log, causes before consequences. Empty if nothing is recognised.

    A log without a known failure may still show a loss that is NaN."""
    explanations: list[Explanation] = []
    imported_again = loading.BOOTSTRAP in text  # by workers, whose tracebacks may be mixed line by line
    for failure in read_failures(text):
        failure.facts.setdefault("missing_main_guard", imported_again)
        finding = explain(failure)
        if finding is None:
            continue
        cause = (finding.rule, finding.place)
        existing = next((e for e in explanations if (e.finding.rule, e.finding.place) == cause), None)
        if existing is None:
            existing = Explanation(finding)
            explanations.append(existing)
        if failure.rank is not None and failure.rank not in existing.ranks:
            existing.ranks.append(failure.rank)
    if not explanations and (symptom := symptoms.log_symptom(text.split("\n"))) is not None:
        return [Explanation(_sanitized(symptom))]
    secondary = {kind.code for kind in TABLE if kind.secondary}
    causes = [e for e in explanations if e.finding.rule not in secondary]
    return (causes or explanations)[:MAX_EXPLANATIONS]


def _sanitized(finding: Finding) -> Finding:
    """The finding without terminal control sequences in names and messages of the user's program."""
    place = finding.place and replace(
        finding.place,
        file=clean(finding.place.file),
        function=clean(finding.place.function),
        text=clean(finding.place.text),
    )
    return replace(
        finding,
        message=_single_line(finding.message),
        fix="\n".join(clean(line) for line in finding.fix.split("\n")),
        place=place,
        evidence=[_single_line(line) for line in finding.evidence],
    )


def _single_line(text: str) -> str:
    return " ".join(clean(text).split())[:600]


def format_lines(finding: Finding, ranks: Sequence[int] = ()) -> list[str]:
    """The explanation as lines for the user: cause, place, evidence, fix, page."""
    names_ranks = not ranks or finding.message.startswith("rank ")
    prefix = "" if names_ranks else f"rank {', '.join(map(str, sorted(ranks)))}: "
    output = [f"{prefix}{finding.message}."]
    if finding.place:
        text = f": {finding.place.text[:160]}" if finding.place.text else ""
        output.append(f"  at     {finding.place.sentence()}{text}")
    for label, lines in (("seen", finding.evidence), ("fix", finding.fix.split("\n"))):
        output += [f"  {'' if number else label:6} {line}" for number, line in enumerate(lines) if line]
    return [*output, f"  more   flatout explain {finding.rule}"]


# The explanation below the traceback of a program that flatout ran.


def explain_crash(error: BaseException) -> list[str]:
    """The lines that explain an error; none if the failure is unknown. The crash report calls this."""
    failure = record_failure(error)
    ranks = [failure.rank] if failure.rank is not None and (failure.world_size or 0) > 1 else []
    return _explained(failure, ranks)


def _explained(failure: FailureRecord, ranks: Sequence[int] = ()) -> list[str]:
    finding = explain(failure)
    return format_lines(finding, ranks) if finding else []


def explain_signal(code: int | None, log: str, oom_kills: int | None) -> list[str]:
    """Explain the death of a program by a signal, which leaves no traceback.

    ``oom_kills`` is the number of OOM kills in its process group during the run."""
    if code is None or not (code < 0 or 128 < code < 160):
        return []
    return _explained(
        FailureRecord(
            signal=-code if code < 0 else code - 128,
            log_lines=log.split("\n")[-80:],
            facts={"oom_kills": oom_kills or 0},
        )
    )
