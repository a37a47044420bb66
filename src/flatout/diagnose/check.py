"""Checks a program with every rule and honours ``# flatout: ignore`` comments.

``# flatout: ignore FL012`` (several codes with commas) hides these rules on its line, or on the next line if
the comment is on a line of its own. Without a code it hides all rules. A comment that hides nothing is itself
a finding, because it would hide the next real one.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from flatout.diagnose.ranking import BY_CODE, order
from flatout.diagnose.rule import Rule
from flatout.diagnose.rules import TABLE
from flatout.diagnose.rules.ignore_without_effect import RULE as UNUSED
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.errors import UsageError
from flatout.schema.findings import Finding

COMMENT = re.compile(r"#\s*flatout:\s*ignore\b[:\s]*([A-Za-z]{2}\d+(?:[,\s]+[A-Za-z]{2}\d+)*)?")


@dataclass(eq=False)
class IgnoreComment:
    """An ignore comment. Empty ``codes`` mean every rule; ``line`` is the line whose findings it hides."""

    source: SourceFile
    at: int
    line: int
    codes: tuple[str, ...]
    used: bool = False


def check(
    program: ScriptProgram,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
    measured: Sequence[Finding] = (),
) -> list[Finding]:
    """Every finding, in the order of ranking.py.

    ``select`` and ``ignore`` are codes or prefixes of codes. ``measured`` are findings of the same rules from
    a run of the program. If both report the same problem on the same line, only the measured finding is kept.

    Raises UsageError for a code that no rule has.
    """
    for wanted in [*select, *ignore]:
        if not any(rule.code.startswith(wanted) for rule in TABLE):
            raise UsageError(
                f"no rule has the code {wanted!r}. `flatout check --explain all` lists the rules."
            )
    chosen = [
        rule
        for rule in TABLE
        if (not select or rule.code.startswith(tuple(select)))
        and not (ignore and rule.code.startswith(tuple(ignore)))
    ]
    return sorted(_kept(program, chosen, measured), key=order)


def _kept(program: ScriptProgram, rules: list[Rule], measured: Sequence[Finding]) -> Iterable[Finding]:
    comments = [comment for source in program.sources for comment in ignores(source)]
    hiding: dict[tuple[str, int], list[IgnoreComment]] = {}
    for comment in comments:
        hiding.setdefault(comment.source.cell(comment.line), []).append(comment)
    seen = set()
    for rule in rules:
        ran = [finding for finding in measured if finding.rule == rule.code]
        info = {(finding.place.file, finding.place.line) for finding in ran if finding.place is not None}
        for finding in [*ran, *(rule.look(program) if rule.look is not None else ())]:
            place = finding.place
            if place is not None and finding not in ran and (place.file, place.line) in info:
                continue
            key = (
                (rule.code, place.file, place.line, place.column)
                if place is not None
                else (rule.code, finding.message)
            )
            if key in seen:
                continue
            seen.add(key)
            hidden = (
                [c for c in hiding.get((place.file, place.line), []) if not c.codes or rule.code in c.codes]
                if place is not None
                else []
            )
            for comment in hidden:
                comment.used = True
            if not hidden:
                yield finding
    if UNUSED in rules:
        yield from _without_effect(comments, rules)


def _without_effect(comments: list[IgnoreComment], rules: list[Rule]) -> Iterable[Finding]:
    known, looked = set(BY_CODE), {rule.code for rule in rules if rule.look is not None}
    for comment in comments:
        unknown = [code for code in comment.codes if code not in known]
        file, line = comment.source.cell(comment.at)
        place = comment.source.place(comment.source.tree, column=False)
        place.file, place.line, place.text = file, line, comment.source.lines[comment.at - 1].strip()
        if unknown:
            yield UNUSED.finding(
                f"the comment switches off {', '.join(unknown)}, but no rule has this code",
                place,
                "correct the code or remove the comment",
            )
        elif not comment.used and (
            (comment.codes and set(comment.codes) <= looked)
            or (not comment.codes and looked == {r.code for r in TABLE if r.look})
        ):
            what = ", ".join(comment.codes) or "every rule"
            yield UNUSED.finding(
                f"the comment switches off {what} on line {comment.source.cell(comment.line)[1]}, but nothing is found there",
                place,
                "remove the comment",
            )


def ignores(source: SourceFile) -> list[IgnoreComment]:
    """The ignore comments of a file. Text inside a string is not a comment."""
    if "flatout:" not in source.text:
        return []
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            match = COMMENT.match(token.string) if token.type == tokenize.COMMENT else None
            if match is not None:
                alone = not token.line[: token.start[1]].strip()
                codes = tuple(code.upper() for code in re.split(r"[,\s]+", match.group(1) or "") if code)
                found.append(IgnoreComment(source, token.start[0], token.start[0] + alone, codes))
    except (tokenize.TokenError, SyntaxError):
        return found
    return found
