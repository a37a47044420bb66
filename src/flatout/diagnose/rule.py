"""A rule: a check of the source, of a profile, or both, with a documentation page.

The docstring of a rule's file is its page. The first line is the title. Then come fixed sections, each a line
``Name:`` followed by indented text: What / Why it matters / How to fix it / Example, and Sources if there
are any. Example is a diff between two complete small programs, Bad and Good, and the tests run the rule on both.
Every line of Bad that ends in ``# <-``, and no other, must be reported by the rule.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity, SourceLocation
from flatout.schema.profile import ProfileRecord

SECTIONS = ("What", "Why it matters", "How to fix it", "Bad", "Good", "Sources")
OMITTED = {"Bad": "+", "Good": "-"}  # the lines of Example that a program has not


@dataclass(frozen=True)
class Rule:
    """``look(program)`` checks the source, ``judge(profile)`` a profile. At least one of them is set.

    ``fix_changes`` says what the edits of its findings change in what the program learns; "" if all losses stay
    the same, bit for bit; None if its findings have no edits.

    ``before``, ``weight`` and the two ``replaced`` fields give the place of its findings among those of others:
    directly before a worse severity; by weight within a severity (below 0: a rule about any line, or about what
    matters only on some machines); dropped if one of these narrower rules reports the problem, anywhere in the
    step or near the same line.
    """

    code: str
    name: str
    severity: Severity
    page: str
    look: Callable[[ScriptProgram], Iterable[Finding]] | None = None
    judge: Callable[[ProfileRecord], Iterable[Finding]] | None = None
    levers: tuple[str, ...] = ()
    fix_changes: str | None = None
    before: Severity | None = None
    weight: int = 0
    replaced_by: tuple[str, ...] = ()
    replaced_at_its_line_by: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.page.strip().splitlines()[0].rstrip(".")

    @property
    def fix_note(self) -> str:
        """What `flatout fix` does about a finding, in one sentence; "" if nothing."""
        if self.fix_changes is None:
            return ""
        if not self.fix_changes:
            return "`flatout fix` makes the edit where it is certain; all losses stay the same, bit for bit."
        return f"`flatout fix --all` makes the edit where it is certain. It changes: {self.fix_changes}."

    @property
    def sections(self) -> Sequence[str]:
        return SECTIONS

    def section(self, name: str) -> str:
        """The text below one heading of the page, without its indent, or one of the two programs of Example.

        Empty if there is no such heading.
        """
        if name not in OMITTED:
            return section(self.page, name)
        lines = [line[2:] for line in section(self.page, "Example").splitlines() if line[:1] != OMITTED[name]]
        return "\n".join(lines if name == "Bad" else [line.removesuffix("  # <-") for line in lines])

    def finding(self, said: str, place: SourceLocation | None = None, fix: str = "", **more: Any) -> Finding:
        """A Finding of this rule. ``more`` are further fields of the Finding."""
        named = {"fix": fix, "levers": list(self.levers), "weight": self.weight}
        return Finding(self.code, self.name, self.severity.value, said, place, **{**named, **more})


def section(page: str, name: str) -> str:
    """The text below the line ``name:`` of a page, without its indent."""
    found = re.search(rf"^{re.escape(name)}:\n((?:[ \t]+.*\n|\n)*)", page.strip() + "\n", re.MULTILINE)
    return textwrap.dedent(found.group(1)).strip("\n") if found else ""
