"""What a rule is: a frozen value with a page, which looks at the source, judges a profile, or does both.

A rule's file is its page: the docstring's first line is the title, then fixed sections, each a line ``Name:`` followed by indented text:
What / Why it matters / How to mend it / Bad / Good, and Sources where it has any. Bad and Good are code: whole small programs, which the
tests run the rule over.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord
from flatout.probe.script import Source

SECTIONS = ("What", "Why it matters", "How to mend it", "Bad", "Good", "Sources")


@dataclass(frozen=True)
class Rule:
    """``look(source)`` reads one file; ``judge(profile)`` reads what was measured. At least one of them is there."""

    code: str
    name: str
    severity: Severity
    page: str
    look: Callable[[Source], Iterable[Finding]] | None = None
    judge: Callable[[ProfileRecord], Iterable[Finding]] | None = None
    levers: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.page.strip().splitlines()[0].rstrip(".")

    def section(self, name: str) -> str:
        """The text below one heading of the page, without its indent; empty where the page has none."""
        found = re.search(rf"^{re.escape(name)}:\n((?:[ \t]+.*\n|\n)*)", self.page.strip() + "\n", re.MULTILINE)
        return textwrap.dedent(found.group(1)).strip("\n") if found else ""
