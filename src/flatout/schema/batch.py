"""Records of `flatout batch`: throughput and memory by batch size, and the gradient noise scale."""

from dataclasses import dataclass, field

from flatout.schema.records import ProgramRecord, Ratio, Record

BATCH_SCHEMA = 1


@dataclass
class BatchPoint(Record):
    """Measurements at one batch size. Times and samples are per optimizer step.

    ``status`` is one of:

    * ``measured``
    * ``too big``: it runs, or would, but leaves no memory margin
    * ``out of memory``
    * ``no such batch``: larger than the dataset
    * ``failed``
    * ``no time``

    ``why`` explains every status except ``measured``. ``speed`` is samples/s relative to the program's own
    size.

    ``accumulated_speed`` is computed, not measured: the program's own effective batch from accumulated
    micro-batches of this size."""

    size: int
    status: str = "measured"
    why: str = ""
    step_ms: float | None = None
    optimizer_ms: float | None = None
    samples_per_step: float | None = None
    samples_per_s: float | None = None
    speed: Ratio | None = None
    micro_batches: float | None = None
    accumulated_speed: Ratio | None = None
    peak_bytes: int | None = None
    retries: int | None = None  # of the device's allocator
    processes: int = 0

    @property
    def fits(self) -> bool:
        return self.status == "measured"


@dataclass
class NoiseScale(Record):
    """The gradient noise scale.

    ``value``, ``low`` and ``high`` are in samples, or in the program's own batches if ``batch`` is None.
    A bound of None means that there is no known upper bound."""

    step: int = 0
    batch: int | None = None
    gradients: int = 0
    value: float | None = None
    low: float | None = None
    high: float | None = None
    squared_norm: float = 0.0  # |G|^2, of the gradient
    trace: float = 0.0  # tr(Sigma), of one sample's gradient
    why_not: str = ""


@dataclass
class BatchRecord(ProgramRecord):
    """Result of `flatout batch`.

    ``own_size`` is the batch size of the program's training loader, ``effective`` the samples per optimizer
    step. ``best`` is the size with the most samples/s that fits. ``near_best`` is the smallest size within a
    few per cent of it, with an interval. ``best_micro_batch`` is the fastest at the own effective batch."""

    schema: int = BATCH_SCHEMA
    budget_s: float = 0.0
    loader: int | None = None
    own_size: int | None = None
    effective: int | None = None
    dataset_samples: int | None = None
    limit_bytes: int | None = None
    limit_source: str = ""
    points: list[BatchPoint] = field(default_factory=list)
    why_no_curve: str = ""
    repeat_ratio: Ratio | None = None  # the program's own size measured again, in other processes
    best: int | None = None
    near_best: int | None = None
    near_best_low: int | None = None
    near_best_high: int | None = None
    best_micro_batch: int | None = None
    noise: NoiseScale = field(default_factory=NoiseScale)
    notes: list[str] = field(default_factory=list)

    @property
    def knee(self) -> int | None:
        """Return ``near_best`` if a larger size was measured, else None."""
        best = self.near_best
        if best is None or any(point.fits and point.speed and point.size > best for point in self.points):
            return best
        return None

    def point(self, size: int | None) -> BatchPoint | None:
        return next((point for point in self.points if point.size == size), None)


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


# Records of `flatout memory`: predicted and measured peak memory of a training step by batch size.

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
    "cuBLAS workspaces",
    "cuDNN and fragmentation",
)


@dataclass
class MemoryPoint(Record):
    """Memory at one batch size.

    ``kinds`` are the bytes at the peak. ``by_module`` are the activations at their own maximum, by the module
    that created them. ``batch_size`` is the batch size of the training loader, or None if the program makes
    its batches itself."""

    batch_size: int | None
    peak_bytes: int | None = None  # predicted
    kinds: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, int] = field(default_factory=dict)
    why_not: str = ""  # reason for a missing prediction
    measured_bytes: int | None = None
    measured_why_not: str = ""  # reason for a missing measurement

    @property
    def error(self) -> float | None:
        """Return predicted over measured, minus 1."""
        if self.peak_bytes is None or not self.measured_bytes:
            return None
        return self.peak_bytes / self.measured_bytes - 1


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
