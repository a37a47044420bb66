"""What `flatout memory` foretold, and what it measured: the peak of a training step against the batch size."""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.plan.records import ProgramRecord, Record

MEMORY_FORECAST_SCHEMA = 1
# What a peak is made of, from what every step has to what only this moment has.
FORECAST_KINDS = ("parameters", "buffers", "optimizer state", "gradients", "held by the program", "inputs", "activations", "temporary")


@dataclass
class MemoryPoint(Record):
    """One batch size. ``kinds`` are bytes at the peak; ``by_module`` are the activations at the moment at which there are most, by the module that made them.

    ``batch_size`` are the samples of a batch of the training loader; None where the program makes its batches itself.
    """

    batch_size: int | None
    peak_bytes: int | None = None  # predicted
    first_peak_bytes: int | None = None  # of a program's very first step, in which optimizers make their state
    kinds: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, int] = field(default_factory=dict)
    why_not: str = ""  # nothing was predicted
    measured_bytes: int | None = None
    measured_why_not: str = ""  # it was to be measured

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return self.peak_bytes / self.measured_bytes - 1 if self.peak_bytes is not None and self.measured_bytes else None


@dataclass
class MemoryForecast(ProgramRecord):
    """``points`` are in order of batch size; ``own`` is the script's own. ``largest`` is predicted to fit into ``limit_bytes``, 0 where one sample does not."""

    schema: int = MEMORY_FORECAST_SCHEMA
    simulated: bool = False  # sizes as CUDA's allocator would hand them out; the program ran elsewhere
    own: int | None = None
    points: list[MemoryPoint] = field(default_factory=list)
    limit_bytes: int | None = None
    limit_of: str = ""  # what the limit is: the device, the machine, asked for
    largest: int | None = None
    largest_peak_bytes: int | None = None
    advice: str = ""
    notes: list[str] = field(default_factory=list)

    def own_point(self) -> MemoryPoint | None:
        return next((point for point in self.points if point.batch_size == self.own), None)
