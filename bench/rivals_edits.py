"""Edits to a public script, stored without the script: short anchors, and the lines that take their place.

An edit file is a TOML list of ``[[edit]]``. Each names one line of the script by a part of it, its anchor:
    after, before    insert ``lines`` there
    replace          put ``lines`` in place of it and of the ``count`` - 1 lines below it
    indent           move it and the ``count`` - 1 lines below it by four columns
``nth`` chooses among several lines with the anchor; without it, there must be exactly one. New lines are
indented as the anchor is, and by ``indented`` more columns. A line that ends in ``# bench`` serves the
benchmark and does not count as edited.
"""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import dataclass
from pathlib import Path

from flatout.schema.plan import read_toml

KINDS = ("after", "before", "replace", "indent")
OF_BENCH = "# bench"
STEP = 4


class EditError(ValueError):
    """An edit that does not fit the script."""


@dataclass(frozen=True)
class Edit:
    kind: str
    anchor: str
    lines: str = ""
    count: int = 1
    nth: int | None = None
    indented: int = 0

    def place(self, script: list[str]) -> int:
        """Returns the index of the anchor's line. Raises EditError unless it is unique or chosen by ``nth``."""
        found = [at for at, line in enumerate(script) if self.anchor in line]
        if self.nth is None and len(found) != 1:
            raise EditError(f"{self.anchor!r} is in {len(found)} lines; it must be in one, or `nth` chooses")
        if self.nth is not None and not 1 <= self.nth <= len(found):
            raise EditError(f"{self.anchor!r} is in {len(found)} lines, so there is no number {self.nth}")
        return found[(self.nth or 1) - 1]

    def apply(self, script: list[str]) -> list[str]:
        at = self.place(script)
        columns = len(script[at]) - len(script[at].lstrip()) + self.indented
        new = textwrap.indent(self.lines.strip("\n"), " " * columns).splitlines() if self.lines else []
        if self.kind == "after":
            return [*script[: at + 1], *new, *script[at + 1 :]]
        if self.kind == "before":
            return [*script[:at], *new, *script[at:]]
        if self.kind == "indent":
            moved = [" " * STEP + line if line.strip() else line for line in script[at : at + self.count]]
            return [*script[:at], *moved, *script[at + self.count :]]
        return [*script[:at], *new, *script[at + self.count :]]


def read_edits(path: Path) -> list[Edit]:
    """Returns the edits of a file, in the order in which they apply. Raises EditError."""
    edits = []
    for entry in read_toml(path.read_text(encoding="utf-8"))["edit"]:
        kinds = [kind for kind in KINDS if kind in entry]
        if len(kinds) != 1:
            raise EditError(f"{path.name}: an edit names one of {', '.join(KINDS)}, not {sorted(entry)}")
        anchor = entry.pop(kinds[0])
        edits.append(Edit(kinds[0], anchor, **entry))
    return edits


def edited(text: str, edits: list[Edit]) -> str:
    """Returns the script after all edits; each anchor is searched in the result of the edits before it."""
    lines = text.splitlines()
    for edit in edits:
        lines = edit.apply(lines)
    return "\n".join(lines) + "\n"


def lines_edited(before: str, after: str) -> int:
    """Returns how many lines a person adds, changes or removes. Blank lines and the benchmark's do not count."""

    def counted(lines: list[str]) -> int:
        return sum(bool(line.strip()) and not line.rstrip().endswith(OF_BENCH) for line in lines)

    a, b = before.splitlines(), after.splitlines()
    return sum(
        max(counted(a[i1:i2]), counted(b[j1:j2]))
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        if tag != "equal"
    )
