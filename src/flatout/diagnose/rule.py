"""A rule: an invariant of the running program, a check of the source or of a profile, with a documentation page.

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
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.agent.frames import Line, place_of
from flatout.schema.findings import Finding, Severity, SourceLocation

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram
    from flatout.schema.profile import ProfileRecord

SECTIONS = ("What", "Why it matters", "How to fix it", "Bad", "Good", "Sources")
OTHER_MARK = {"Bad": "+", "Good": "-"}  # the diff mark of lines that only the other program has


@dataclass(frozen=True)
class Rule:
    """A rule has an ``invariant``, ``check_source`` or ``check_profile``.

    ``sort_before`` puts its findings directly before those of a worse severity. ``weight`` sorts within a
    severity; below 0 are rules about any line, or about what matters only on some machines. A finding is dropped
    if a rule of ``replaced_by`` reports anything, or one of ``replaced_at_its_line_by`` something near its line."""

    sections: ClassVar[Sequence[str]] = SECTIONS

    code: str
    name: str
    severity: Severity
    page: str
    check_source: Callable[[ScriptProgram], Iterable[Finding]] | None = None
    check_profile: Callable[[ProfileRecord], Iterable[Finding]] | None = None
    invariant: type[Any] | None = None  # of `Invariant`
    levers: tuple[str, ...] = ()
    sort_before: Severity | None = None
    weight: int = 0
    replaced_by: tuple[str, ...] = ()
    replaced_at_its_line_by: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.page.strip().splitlines()[0].rstrip(".")

    def section(self, name: str) -> str:
        """The text below one heading of the page, without its indent, or one of the two programs of Example.

        Empty if there is no such heading."""
        if name not in OTHER_MARK:
            return section(self.page, name)
        lines = [
            line[2:] for line in section(self.page, "Example").splitlines() if line[:1] != OTHER_MARK[name]
        ]
        return "\n".join(lines if name == "Bad" else [line.removesuffix("  # <-") for line in lines])

    def finding(
        self, message: str, place: SourceLocation | Line | None = None, fix: str = "", **fields: Any
    ) -> Finding:
        """A Finding of this rule. ``fields`` are further fields of the Finding."""
        if isinstance(place, tuple):
            place = place_of(place)
        defaults = {"fix": fix, "levers": list(self.levers), "weight": self.weight}
        return Finding(self.code, self.name, self.severity.value, message, place, **{**defaults, **fields})

    def profile_finding(
        self, message: str, places: Sequence[SourceLocation | None] = (), how: str = "", **fields: Any
    ) -> Finding:
        """A Finding in a profile, at the first of ``places``. Its fix is the page's if none is given."""
        fields["how"] = how if fields.get("predicted") else ""
        fields["others"] = [place for place in places[1:] if place is not None]
        fields.setdefault("fix", _unwrapped(self.section("How to fix it")))
        return self.finding(message, places[0] if places else None, weight=0, **fields)


def section(page: str, name: str) -> str:
    """The text below the line ``name:`` of a page, without its indent."""
    match = re.search(rf"^{re.escape(name)}:\n((?:[ \t]+.*\n|\n)*)", page.strip() + "\n", re.MULTILINE)
    return textwrap.dedent(match[1]).strip("\n") if match else ""


def _unwrapped(text: str) -> str:
    """Joins prose into one line; a command keeps its own line."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and not line.startswith("flatout ") and not lines[-1].startswith("flatout "):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)
