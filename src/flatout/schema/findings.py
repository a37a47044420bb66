"""Findings of the diagnosis, as JSON records.

The code of a rule never changes and is never reused. Prefixes: FL for a training program (static or
measured), FD for the machine, FE for an error. The code, the name and the page are public; the implementation
may change.
"""

from dataclasses import dataclass, field

from flatout.schema.enums import StrEnum
from flatout.schema.records import Ratio, Record


class Severity(StrEnum):
    """The cost of a problem. Findings are shown in the order of the members."""

    FATAL = "the program ends"
    WRONG = "wrong result"
    TIME = "wasted time"
    MEMORY = "wasted memory"
    FRAGILE = "fragile"  # works here and now, but may break


@dataclass
class SourceLocation(Record):
    """A place in the user's source. Lines and columns count from 1; column 0 means the whole line."""

    file: str
    line: int
    column: int = 0
    function: str = ""
    text: str = ""  # the line itself, stripped
    indent: int = 0  # number of characters stripped before the line

    def sentence(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass
class Finding(Record):
    """One finding.

    ``message`` is one sentence with the figures. ``evidence`` are further lines, most important first. ``fix``
    is code or one command. ``levers`` apply the fix without editing the script. ``predicted`` is the speed-up
    from the fix; ``how`` says how it was measured or estimated. ``weight`` is above 0 for a fault that costs more than others of its severity, and
    below 0 for one that may cost little."""

    rule: str
    name: str
    severity: str
    message: str
    place: SourceLocation | None = None
    evidence: list[str] = field(default_factory=list)
    fix: str = ""
    levers: list[str] = field(default_factory=list)
    predicted: Ratio | None = None
    how: str = ""
    others: list[SourceLocation] = field(default_factory=list)  # further places with the same problem
    weight: int = 0
