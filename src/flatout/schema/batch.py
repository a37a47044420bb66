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
        return (
            self.near_best
            if self.near_best is not None
            and any(point.fits and point.speed and point.size > self.near_best for point in self.points)
            else None
        )

    def point(self, size: int | None) -> BatchPoint | None:
        return next((point for point in self.points if point.size == size), None)
