"""Checks a program with every rule and honours ``# flatout: ignore`` comments.

``# flatout: ignore FL012`` (several codes with commas) hides these rules on its line, or on the next line if
the comment is on a line of its own. Without a code it hides all rules. A comment that hides nothing is itself
a finding, because it would hide the next real one.
"""

import io
import re
import tokenize
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules import TABLE
from flatout.diagnose.rules.ignore_without_effect import RULE as IGNORE_WITHOUT_EFFECT
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.errors import UsageError
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

# The order of findings, and which rule reports a problem that several rules see.
#
# By severity, then by predicted speed-up, then by weight, then by place. Memory that grows with every step comes
# before wasted time, because it ends the run. If several rules report one problem, only the narrowest is kept.

SEVERITY_ORDER = {severity.value: float(number) for number, severity in enumerate(Severity)}
BY_CODE = {rule.code: rule for rule in TABLE}
NEAR_LINES = 3


def profile_findings(profile: ProfileRecord) -> list[Finding]:
    """All findings in a profile, ranked. An error in a rule is raised."""
    return ranked(
        [finding for rule in TABLE if rule.check_profile for finding in rule.check_profile(profile)]
    )


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


COMMENT = re.compile(r"#\s*flatout:\s*ignore\b[:\s]*([A-Za-z]{2}\d+(?:[,\s]+[A-Za-z]{2}\d+)*)?")


@dataclass(eq=False)
class IgnoreComment:
    """An ignore comment. Empty ``codes`` mean every rule."""

    source: SourceFile
    comment_line: int
    hidden_line: int  # whose findings it hides
    codes: tuple[str, ...]
    used: bool = False


def check(
    program: ScriptProgram,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
    measured: Sequence[Finding] = (),
) -> list[Finding]:
    """Every finding, in the order of `ranked`.

    ``select`` and ``ignore`` are codes or prefixes of codes. ``measured`` are findings of the same rules from
    a run of the program. If both report the same problem on the same line, only the measured finding is kept.

    Raises UsageError for a code that no rule has."""
    for prefix in [*select, *ignore]:
        if not any(rule.code.startswith(prefix) for rule in TABLE):
            raise UsageError(
                f"no rule has the code {prefix!r}. `flatout check --explain all` lists the rules."
            )
    chosen = [
        rule
        for rule in TABLE
        if (not select or rule.code.startswith(tuple(select)))
        and not (ignore and rule.code.startswith(tuple(ignore)))
    ]
    return sorted(_visible(program, chosen, measured), key=sort_key)


def _visible(program: ScriptProgram, rules: list[Rule], measured: Sequence[Finding]) -> Iterable[Finding]:
    """The findings that no comment hides, each once, and the comments that hide nothing."""
    comments = [comment for source in program.sources for comment in ignore_comments(source)]
    comments_by_line: dict[tuple[str, int], list[IgnoreComment]] = {}
    for comment in comments:
        comments_by_line.setdefault(comment.source.cell(comment.hidden_line), []).append(comment)
    reported = set()
    for rule in rules:
        from_run = [finding for finding in measured if finding.rule == rule.code]
        measured_lines = {(f.place.file, f.place.line) for f in from_run if f.place is not None}
        for finding in [*from_run, *(rule.check_source(program) if rule.check_source else ())]:
            place = finding.place
            line = (place.file, place.line) if place is not None else ("", 0)
            if finding not in from_run and line in measured_lines:
                continue
            key = (rule.code, *line, finding.message if place is None else place.column)
            if key in reported:
                continue
            reported.add(key)
            hiding = [c for c in comments_by_line.get(line, []) if not c.codes or rule.code in c.codes]
            for comment in hiding:
                comment.used = True
            if not hiding:
                yield finding
    if IGNORE_WITHOUT_EFFECT in rules:
        yield from _unused_comments(comments, rules)


def _unused_comments(comments: list[IgnoreComment], rules: list[Rule]) -> Iterable[Finding]:
    checked_codes = {rule.code for rule in rules if rule.check_source}
    for comment in comments:
        unknown = [code for code in comment.codes if code not in BY_CODE]
        file, line = comment.source.cell(comment.comment_line)
        place = comment.source.place(comment.source.tree)
        place.file, place.line, place.column = file, line, 0
        place.text = comment.source.lines[comment.comment_line - 1].strip()
        if unknown:
            yield IGNORE_WITHOUT_EFFECT.finding(
                f"the comment switches off {', '.join(unknown)}, but no rule has this code",
                place,
                "correct the code or remove the comment",
            )
        elif not comment.used and comment.codes and checked_codes >= set(comment.codes):
            codes = ", ".join(comment.codes)
            yield IGNORE_WITHOUT_EFFECT.finding(
                f"the comment switches off {codes} on line {comment.source.cell(comment.hidden_line)[1]}, but nothing is found there",
                place,
                "remove the comment",
            )


def ignore_comments(source: SourceFile) -> list[IgnoreComment]:
    """The ignore comments of a file. Text inside a string is not a comment."""
    if "flatout:" not in source.text:
        return []
    comments = []
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            match = COMMENT.match(token.string) if token.type == tokenize.COMMENT else None
            if match is not None:
                has_own_line = not token.line[: token.start[1]].strip()
                codes = tuple(code.upper() for code in re.split(r"[,\s]+", match[1] or "") if code)
                comments.append(IgnoreComment(source, token.start[0], token.start[0] + has_own_line, codes))
    return comments
