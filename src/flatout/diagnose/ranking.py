"""The order of findings, and which rule reports a problem that several rules see.

By severity, then by predicted speed-up, then by weight, then by place. Memory that grows with every step comes
before wasted time, because it ends the run. If several rules report one problem, only the narrowest is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

LEVELS = {severity.value: float(number) for number, severity in enumerate(Severity)}
BY_CODE = {rule.code: rule for rule in TABLE}
NEAR = 3  # lines


def judge(profile: ProfileRecord) -> list[Finding]:
    """All findings in a profile, ranked. An error in a rule is raised."""
    return ranked([finding for rule in TABLE if rule.judge is not None for finding in rule.judge(profile)])


def placed(findings: Iterable[Finding], program: ScriptProgram) -> list[Finding]:
    """Give measured findings the line of their cause, where the same rule finds it in the source, and sort them.

    A measurement of a wrong result knows the step, but not the cause. Other findings keep their line.
    """
    findings = list(findings)
    looks = {rule.code: rule.look for rule in TABLE if rule.look is not None}
    for finding in findings:
        if finding.rule in looks and (finding.place is None or finding.severity == Severity.WRONG.value):
            causes = [seen.place for seen in looks[finding.rule](program) if seen.place is not None]
            if causes:
                finding.others = [*causes[1:], *([finding.place] if finding.place else []), *finding.others]
                finding.place = causes[0]
    return sorted(findings, key=order)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The findings in order, without those that a narrower rule reports as well."""
    kept = [finding for finding in findings if not any(_replaces(other, finding) for other in findings)]
    return sorted(kept, key=order)


def order(finding: Finding) -> tuple[float, float, int, str, int, int, str]:
    """The key by which findings are sorted: what costs most first, then by file and line."""
    rule, place = BY_CODE.get(finding.rule), finding.place
    before = rule.before if rule is not None else None
    return (
        LEVELS[finding.severity] if before is None else LEVELS[before] - 0.5,
        -(finding.predicted.median if finding.predicted else 0.0),
        -finding.weight,
        *((place.file, place.line, place.column) if place else ("", 0, 0)),
        finding.rule,
    )


def _replaces(narrow: Finding, wide: Finding) -> bool:
    rule = BY_CODE.get(wide.rule)
    if rule is None:
        return False
    if narrow.name in rule.replaced_by:
        return True
    return narrow.name in rule.replaced_at_its_line_by and (
        wide.place is None
        or any(
            place.file == wide.place.file and abs(place.line - wide.place.line) <= NEAR
            for place in (narrow.place, *narrow.others)
            if place is not None
        )
    )
