"""What `flatout batch` saw: throughput and memory against batch size, and the gradient noise scale."""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.plan.records import ProgramRecord, Ratio, Record

BATCH_SCHEMA = 1


@dataclass
class BatchPoint(Record):
    """One batch size. Times and samples are of one optimizer step, as the program does it with this many samples a batch.

    ``status`` is ``measured``, ``too big`` (it ran, or would, and leaves no margin), ``out of memory``, ``no such batch`` (larger than the data set),
    ``failed`` or ``no time``; ``why`` says it in a sentence where it is not ``measured``. ``speed`` is samples/s against the program's own size.

    ``kept_speed`` is computed, not measured: the program's own effective batch, made of micro-batches of this size and one update.
    """

    size: int
    status: str = "measured"
    why: str = ""
    step_ms: float | None = None
    optimizer_ms: float | None = None
    samples_per_step: float | None = None
    samples_per_s: float | None = None
    speed: Ratio | None = None
    kept_micro_batches: float | None = None
    kept_samples_per_s: float | None = None
    kept_speed: Ratio | None = None
    peak_bytes: int | None = None
    retries: int | None = None  # of the device's allocator
    processes: int = 0

    @property
    def fits(self) -> bool:
        return self.status == "measured"


@dataclass
class NoiseSeen(Record):
    """``value``, ``low`` and ``high`` are samples, or batches of the program's own where ``batch`` is None. A bound that is None is not known from above."""

    step: int = 0
    batch: int | None = None
    gradients: int = 0
    value: float | None = None
    low: float | None = None
    high: float | None = None
    gradient: float = 0.0  # |G|^2
    trace: float = 0.0  # tr(Sigma), of one sample's gradient
    why_not: str = ""


@dataclass
class BatchRecord(ProgramRecord):
    """``own`` is the size of the program's own training loader, ``effective`` how many samples one of its optimizer steps takes.

    ``best`` is the size with the most samples/s of those that fit; ``enough`` the smallest one that is within a few per cent of it, with an interval.
    ``kept_best`` is the micro-batch that is fastest where the effective batch stays the program's own.
    """

    schema: int = BATCH_SCHEMA
    budget_s: float = 0.0
    loader: int | None = None
    own: int | None = None
    effective: int | None = None
    dataset_samples: int | None = None
    limit_bytes: int | None = None
    limit: str = ""  # whose limit that is
    points: list[BatchPoint] = field(default_factory=list)
    why_no_curve: str = ""
    again: Ratio | None = None  # the program's own size against itself, in other processes
    best: int | None = None
    enough: int | None = None
    enough_low: int | None = None
    enough_high: int | None = None
    kept_best: int | None = None
    noise: NoiseSeen = field(default_factory=NoiseSeen)
    notes: list[str] = field(default_factory=list)

    @property
    def knee(self) -> int | None:
        """``enough``, where larger sizes were measured that show it."""
        return self.enough if self.enough is not None and any(point.fits and point.speed and point.size > self.enough for point in self.points) else None

    def point(self, size: int | None) -> BatchPoint | None:
        return next((point for point in self.points if point.size == size), None)
