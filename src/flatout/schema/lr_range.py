"""The record of `flatout lr`: the loss of an unmodified program under a growing learning rate."""

from dataclasses import dataclass, field

from flatout.schema.records import ProgramRecord, Record

LR_SCHEMA = 2


@dataclass
class LrPoint(Record):
    """One step: learning rate of the first parameter group, loss before the update, loss smoothed so far."""

    lr: float
    loss: float | None  # None if it was not finite
    smooth: float | None = None


@dataclass
class LrRecord(ProgramRecord):
    """``steepest`` is the learning rate at which the smoothed loss falls fastest, ``lowest`` the one at which
    it is lowest, ``diverged`` the one at which it diverges. ``groups`` are the script's own learning rates."""

    schema: int = LR_SCHEMA
    optimizer: str = ""  # class name
    groups: list[float] = field(default_factory=list)
    warmup_steps: int = 0  # at the script's own learning rate, before the test
    step_ms: float | None = None  # median
    points: list[LrPoint] = field(default_factory=list)
    steepest: float | None = None
    lowest: float | None = None
    diverged: float | None = None
    suggestion: float | None = None
    why: str = ""  # reason for the suggestion, or for its absence
    notes: list[str] = field(default_factory=list)
