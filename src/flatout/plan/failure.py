"""What is known of a failure: a plain record, filled from the text of a traceback or, in the dying process, from its objects.

Nothing in it is a value of the program's data: of tensors it holds shape, dtype and device, and of integer tensors the smallest and the
largest entry, because a label or an index that is out of range is told by that alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.plan.findings import Place
from flatout.plan.records import Record


@dataclass
class TensorSeen(Record):
    """A tensor by the name that the source gives it. ``low`` and ``high`` are there for small integer tensors on the CPU."""

    name: str
    shape: list[int]
    dtype: str  # without the "torch."
    device: str
    requires_grad: bool = False
    low: int | None = None
    high: int | None = None
    where_low: list[int] = field(default_factory=list)  # the index of that entry
    where_high: list[int] = field(default_factory=list)

    def sentence(self) -> str:
        size = "x".join(map(str, self.shape)) if self.shape else "scalar"
        return f"{self.name}: {size} {self.dtype} on {self.device}"


@dataclass
class FrameSeen(Record):
    """One frame. ``mine`` says that it is the user's own code: not the standard library, not an installed package."""

    file: str
    line: int
    function: str = ""
    text: str = ""
    mine: bool = False
    tensors: list[TensorSeen] = field(default_factory=list)

    def place(self) -> Place:
        return Place(self.file, self.line, 0, "" if self.function == "<module>" else self.function, self.text)


@dataclass
class Thrown(Record):
    """One exception. ``names`` are those of its classes, most special first; ``frames`` go from the outermost to where it was raised.

    ``link`` says how the one after it in the chain came of it: ``cause`` (raise ... from), ``context`` (raised while handling it) or
    ``carried`` (its text came from another process, inside the message of the next).
    """

    type: str
    names: list[str] = field(default_factory=list)
    message: str = ""
    notes: list[str] = field(default_factory=list)
    frames: list[FrameSeen] = field(default_factory=list)
    link: str = ""

    @property
    def own(self) -> FrameSeen | None:
        """The innermost frame of the user's own."""
        return next((frame for frame in reversed(self.frames) if frame.mine), None)

    @property
    def raised_by_user(self) -> bool:
        """Whether the user's own ``raise`` or ``assert`` made it: then its words are the user's, not torch's."""
        last = self.frames[-1] if self.frames else None
        return last is not None and last.mine and last.text.startswith(("raise ", "assert ", "raise(", "assert("))


@dataclass
class ModuleSeen(Record):
    """The innermost nn.Module whose forward was running: ``path`` from the outermost one, with the name the user's code has for that."""

    path: str
    kind: str
    parameters: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class FailureRecord(Record):
    """One death of one process. ``chain`` begins with what went wrong first and ends with what ended the program.

    ``around`` are lines of the log near it. ``memory`` counts bytes, ``facts`` are single numbers and words about the process.
    """

    chain: list[Thrown] = field(default_factory=list)
    around: list[str] = field(default_factory=list)
    live: bool = False
    rank: int | None = None
    world_size: int | None = None
    module: ModuleSeen | None = None
    batch: int | None = None  # how many batches the loader had given, less one
    signal: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FailureRecord:
        """Raises TypeError for what is JSON, and no failure."""
        record = super().from_json(data)
        record.module = ModuleSeen.from_json(data["module"]) if data.get("module") else None
        record.chain = [Thrown.from_json(thrown) for thrown in data.get("chain", ())]
        for thrown, raw in zip(record.chain, data.get("chain", ()), strict=True):
            thrown.frames = [FrameSeen.from_json(frame) for frame in raw.get("frames", ())]
            for frame, seen in zip(thrown.frames, raw.get("frames", ()), strict=True):
                frame.tensors = [TensorSeen.from_json(tensor) for tensor in seen.get("tensors", ())]
        return record

    @property
    def own(self) -> FrameSeen | None:
        """The innermost line of the user's own code, of the first exception that has one."""
        return next((frame for thrown in self.chain if (frame := thrown.own)), None)

    @property
    def tensors(self) -> list[TensorSeen]:
        """Tensors by name, the innermost frame's first."""
        return [tensor for thrown in self.chain for frame in reversed(thrown.frames) for tensor in frame.tensors]
