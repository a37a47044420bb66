"""Record of a failure, filled from the text of a traceback or from the objects of the failing process.

It holds no data of the program: of tensors only shape, dtype and device, and of integer tensors the smallest
and the largest entry. Those two are enough to identify a label or an index out of range.
"""

from dataclasses import dataclass, field
from typing import Any

from flatout.schema.findings import SourceLocation
from flatout.schema.records import Record

FAILURE_SCHEMA = 1


@dataclass
class TensorRecord(Record):
    """A tensor, under its name in the source.

    ``low`` and ``high`` are set for small integer tensors on the CPU."""

    name: str
    shape: list[int]
    dtype: str  # without "torch."
    device: str
    requires_grad: bool = False
    low: int | None = None
    high: int | None = None
    argmin: list[int] = field(default_factory=list)  # the index of ``low``
    argmax: list[int] = field(default_factory=list)

    def sentence(self) -> str:
        size = "x".join(map(str, self.shape)) if self.shape else "scalar"
        return f"{self.name}: {size} {self.dtype} on {self.device}"


@dataclass
class FrameRecord(Record):
    """One stack frame. ``is_user_code``: neither the standard library nor an installed package."""

    file: str
    line: int
    function: str = ""
    text: str = ""
    is_user_code: bool = False
    tensors: list[TensorRecord] = field(default_factory=list)

    def place(self) -> SourceLocation:
        return SourceLocation(
            self.file, self.line, 0, "" if self.function == "<module>" else self.function, self.text
        )


@dataclass
class ExceptionRecord(Record):
    """One exception of a chain.

    ``class_names``: most derived first. ``frames`` run from the outermost to the raising frame.
    ``link`` is the relation to the next exception of the chain: ``cause`` (raise ... from), ``context``
    (raised while handling it) or ``carried`` (its text came from another process, inside the message of the
    next)."""

    type: str
    class_names: list[str] = field(default_factory=list)
    message: str = ""
    notes: list[str] = field(default_factory=list)
    frames: list[FrameRecord] = field(default_factory=list)
    link: str = ""

    @property
    def user_frame(self) -> FrameRecord | None:
        """Return the innermost frame of the user's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_user_code), None)

    @property
    def raised_by_user(self) -> bool:
        """Return whether a ``raise`` or ``assert`` of the user raised it.

        Then the message is the user's, not torch's."""
        last = self.frames[-1] if self.frames else None
        return (
            last is not None
            and last.is_user_code
            and last.text.startswith(("raise ", "assert ", "raise(", "assert("))
        )


@dataclass
class ModuleRecord(Record):
    """The innermost nn.Module whose forward was running.

    ``path`` starts at the outermost module, under its variable name in the user's code."""

    path: str
    kind: str
    parameters: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class FailureRecord(Record):
    """The failure of one process.

    ``chain`` starts with the first exception and ends with the one that ended the program. ``log_lines`` are
    those around it. ``memory`` is in bytes. ``facts`` are single values about the process."""

    chain: list[ExceptionRecord] = field(default_factory=list)
    log_lines: list[str] = field(default_factory=list)
    live: bool = False
    rank: int | None = None
    world_size: int | None = None
    module: ModuleRecord | None = None
    batch: int | None = None  # number of batches the loader had returned, minus one
    signal: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    schema: int = FAILURE_SCHEMA

    @property
    def user_frame(self) -> FrameRecord | None:
        """Return the innermost frame of the user's own code, from the first exception that has one."""
        return next((frame for thrown in self.chain if (frame := thrown.user_frame)), None)

    @property
    def tensors(self) -> list[TensorRecord]:
        """Return the tensors of all frames, innermost frame first."""
        return [
            tensor for thrown in self.chain for frame in reversed(thrown.frames) for tensor in frame.tensors
        ]
