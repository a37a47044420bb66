"""What diagnosis says: a Finding, and the Rule behind it. Everything here is JSON, like the other records.

A Rule's code never changes and is never given twice: FL for a training program (static or measured), FD for the machine, FE for an
error. The code, the name and the page are the public face; what stands in the source behind it may change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from flatout.plan.records import Ratio, Record


class Severity(StrEnum):
    """What it costs to leave a thing as it is. The order of the members is the order in which findings are shown."""

    FATAL = "the program ends"
    WRONG = "wrong result"
    TIME = "wasted time"
    MEMORY = "wasted memory"
    FRAGILE = "fragile"  # works here and today


@dataclass
class Place(Record):
    """A place in the user's own source. Lines and columns count from 1; column 0 means the whole line."""

    file: str
    line: int
    column: int = 0
    function: str = ""
    text: str = ""  # the line itself, stripped
    indent: int = 0  # how many signs were stripped before it

    def sentence(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass
class Finding(Record):
    """One thing that was found.

    ``said`` is one sentence with the numbers in it; ``evidence`` are further lines, most telling first; ``mend`` is what to do, as
    lines of code or one command. ``levers`` name what would do it without an edit. ``predicted`` is how many times as fast the step would
    be, from a what-if that was measured (``how`` says which); ``measured`` is what came of it once it was tried.
    """

    rule: str
    name: str
    severity: str
    said: str
    place: Place | None = None
    evidence: list[str] = field(default_factory=list)
    mend: str = ""
    levers: list[str] = field(default_factory=list)
    predicted: Ratio | None = None
    how: str = ""
    measured: Ratio | None = None
    others: list[Place] = field(default_factory=list)  # further places with the same fault
