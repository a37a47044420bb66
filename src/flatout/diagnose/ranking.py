"""The order of findings, and which rule reports a problem that several rules see.

By severity, then by predicted speed-up, then by weight, then by place. Memory that grows with every step comes
before wasted time, because it ends the run. If several rules report one problem, only the narrowest is kept.
"""

from collections.abc import Iterable, Sequence

from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

SEVERITY_ORDER = {severity.value: float(number) for number, severity in enumerate(Severity)}
BY_CODE = {rule.code: rule for rule in TABLE}
NEAR_LINES = 3


def profile_findings(profile: ProfileRecord) -> list[Finding]:
    """All findings in a profile, ranked. An error in a rule is raised."""
    return ranked(
        [finding for rule in TABLE if rule.check_profile for finding in rule.check_profile(profile)]
    )


def locate_causes(findings: Iterable[Finding], program: ScriptProgram) -> list[Finding]:
    """Give measured findings the line of their cause, where the same rule finds it in the source, and sort them.

    A measurement of a wrong result knows the step, but not the cause. Other findings keep their line.
    """
    findings = list(findings)
    source_checks = {rule.code: rule.check_source for rule in TABLE if rule.check_source is not None}
    for finding in findings:
        check = source_checks.get(finding.rule)
        if check and (finding.place is None or finding.severity == Severity.WRONG.value):
            causes = [cause.place for cause in check(program) if cause.place is not None]
            if causes:
                finding.others = [*causes[1:], *([finding.place] if finding.place else []), *finding.others]
                finding.place = causes[0]
    return sorted(findings, key=sort_key)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The findings in order, without those that a narrower rule reports as well."""
    narrowest = [finding for finding in findings if not any(_replaces(other, finding) for other in findings)]
    return sorted(narrowest, key=sort_key)


def sort_key(finding: Finding) -> tuple[float, float, int, str, int, int, str]:
    """What costs most comes first, then by file and line."""
    rule, place = BY_CODE.get(finding.rule), finding.place
    before = rule.sort_before if rule is not None else None
    return (
        SEVERITY_ORDER[finding.severity] if before is None else SEVERITY_ORDER[before] - 0.5,
        -(finding.predicted.median if finding.predicted else 0.0),
        -finding.weight,
        *((place.file, place.line, place.column) if place else ("", 0, 0)),
        finding.rule,
    )


def _replaces(narrow: Finding, wide: Finding) -> bool:
    rule = BY_CODE.get(wide.rule)
    if rule is None or narrow.name in rule.replaced_by:
        return rule is not None
    return narrow.name in rule.replaced_at_its_line_by and (
        wide.place is None
        or any(
            place.file == wide.place.file and abs(place.line - wide.place.line) <= NEAR_LINES
            for place in (narrow.place, *narrow.others)
            if place is not None
        )
    )
