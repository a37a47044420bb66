"""Records of `flatout memory`: predicted and measured peak memory of a training step by batch size."""

from dataclasses import dataclass, field

from flatout.schema.records import ProgramRecord, Record

MEMORY_FORECAST_SCHEMA = 1
# Components of a peak, from permanent to temporary.
FORECAST_KINDS = (
    "parameters",
    "buffers",
    "optimizer state",
    "gradients",
    "held by the program",
    "inputs",
    "activations",
    "temporary",
)


@dataclass
class MemoryPoint(Record):
    """Memory at one batch size.

    ``kinds`` are the bytes at the peak. ``by_module`` are the activations at their own maximum, by the module
    that created them. ``batch_size`` is the batch size of the training loader, or None if the program makes
    its batches itself."""

    batch_size: int | None
    peak_bytes: int | None = None  # predicted
    first_peak_bytes: int | None = None  # of the first step, in which optimizers create their state
    kinds: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, int] = field(default_factory=dict)
    why_not: str = ""  # reason for a missing prediction
    measured_bytes: int | None = None
    measured_why_not: str = ""  # reason for a missing measurement

    @property
    def error(self) -> float | None:
        """Return predicted over measured, minus 1."""
        return (
            self.peak_bytes / self.measured_bytes - 1
            if self.peak_bytes is not None and self.measured_bytes
            else None
        )


@dataclass
class MemoryForecast(ProgramRecord):
    """Result of `flatout memory`.

    ``points`` are in order of batch size. ``own_size`` is the script's. ``largest`` is the largest size
    that is predicted to fit into ``limit_bytes``, or 0 if not even one sample fits."""

    schema: int = MEMORY_FORECAST_SCHEMA
    simulated: bool = False  # sizes follow CUDA's allocator, but the program ran on another device
    own_size: int | None = None
    points: list[MemoryPoint] = field(default_factory=list)
    limit_bytes: int | None = None
    limit_source: str = ""  # source of the limit: the device, the machine, or requested
    largest: int | None = None
    largest_peak_bytes: int | None = None
    advice: str = ""
    notes: list[str] = field(default_factory=list)

    def own_point(self) -> MemoryPoint | None:
        return next((point for point in self.points if point.batch_size == self.own_size), None)
