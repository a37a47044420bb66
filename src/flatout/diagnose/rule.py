"""What a rule is: a frozen value with a page, which looks at the source, judges a profile, or does both.

A rule's file is its page: the docstring's first line is the title, then fixed sections, each a line ``Name:`` followed by indented text:
What / Why it matters / How to mend it / Bad / Good, and Sources where it has any. Bad and Good are code: whole small programs, which the
tests run the rule over. A line of Bad that ends in ``# <-`` is one that the rule must name, and no other.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flatout.plan.findings import Finding, Place, Severity
from flatout.plan.profile import ProfileRecord
from flatout.probe.program import Program

SECTIONS = ("What", "Why it matters", "How to mend it", "Bad", "Good", "Sources")


@dataclass(frozen=True)
class Rule:
    """``look(program)`` reads the source; ``judge(profile)`` reads what was measured. At least one of them is there."""

    code: str
    name: str
    severity: Severity
    page: str
    look: Callable[[Program], Iterable[Finding]] | None = None
    judge: Callable[[ProfileRecord], Iterable[Finding]] | None = None
    levers: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.page.strip().splitlines()[0].rstrip(".")

    @property
    def sections(self) -> Sequence[str]:
        return SECTIONS

    def section(self, name: str) -> str:
        """The text below one heading of the page, without its indent; empty where the page has none."""
        return section(self.page, name)

    def finding(self, said: str, place: Place | None = None, mend: str = "", **more: object) -> Finding:
        """A Finding of this rule. ``more`` are further fields of it."""
        return Finding(self.code, self.name, self.severity.value, said, place, mend=mend, levers=list(self.levers), **more)  # type: ignore[arg-type]


def section(page: str, name: str) -> str:
    """The text below the line ``name:`` of a page, without its indent."""
    found = re.search(rf"^{re.escape(name)}:\n((?:[ \t]+.*\n|\n)*)", page.strip() + "\n", re.MULTILINE)
    return textwrap.dedent(found.group(1)).strip("\n") if found else ""
