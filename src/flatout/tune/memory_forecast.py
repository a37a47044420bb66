"""Predicts the memory of a step at several batch sizes, then measures some of them in real steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.batch_curve import largest_that_fits
from flatout.measure.clock import seconds
from flatout.schema import sizes
from flatout.schema.batch import MemoryForecast, MemoryPoint
from flatout.schema.errors import NothingMeasured
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.memory_prediction import ENTRY
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions
from flatout.tune.endings import unmeasured_error

START_TIMEOUT_S = 600.0  # until the first batch
STEPS_TIMEOUT_S = 600.0  # for the steps of one batch size, with shapes alone
EXIT_TIMEOUT_S = 60.0
MEASURED_TICKS = 4
SAFE_SHARE = 0.9  # of a limit; a measurement beyond it might kill the program or other processes
REMEDIES = {
    "activations": "Recomputing activations (torch.utils.checkpoint) reduces them for about a third more time",
    "temporary": "Smaller micro-batches with accumulation need less at once",
}


@dataclass(frozen=True)
class ForecastOptions:
    """The options of a forecast.

    ``sizes`` are batch sizes besides the script's own. ``cuda``: predict the sizes of the CUDA allocator
    although the program runs on another device.
    """

    sizes: Sequence[int] = ()
    cuda: bool = False
    limit_bytes: int | None = None
    measure: bool = True
    budget_s: float = 300.0  # for measuring


class Forecast:
    """Fills a record.

    One program answers for every batch size; if a size ends it, another one answers for the rest.
    """

    def __init__(
        self,
        command: Command,
        job: JobFolder,
        facts: Facts,
        record: MemoryForecast,
        options: ForecastOptions,
        stage: Callable[[str, str], None] = lambda name, detail: None,
    ) -> None:
        self.command, self.job, self.facts, self.record, self.options = command, job, facts, record, options
        self.stage = stage
        self.trial: Trial | None = None
        self.ready: dict[str, Any] = {}
        self.points: dict[int | None, MemoryPoint] = {}
        self.guessed_values: set[str] = set()
        self.uses_closures = False  # a step is a closure that an optimizer calls repeatedly

    def run(self) -> MemoryForecast:
        """Predict, then measure. Raises NothingMeasured or ProgramFailed."""
        record, options = self.record, self.options
        try:
            base = self.predict(None)
            record.device, record.own_size = self.ready["device"], self.ready["samples"]
            record.simulated = self.ready["simulated"]
            if base.why_not:
                raise NothingMeasured(f"the memory of this program cannot be predicted: {base.why_not}.")
            for size in dict.fromkeys(options.sizes):
                self.predict(size)
            self._apply_limit()
            if self.trial is not None:
                self.trial.finish(
                    seconds() + EXIT_TIMEOUT_S
                )  # the program ends by itself, with everything restored
        finally:
            self._close_trial()
        record.points = sorted(self.points.values(), key=lambda point: point.batch_size or 0)
        self._add_notes()
        if options.measure:
            self._measure(base)
        record.status = "done"
        return record

    # -- prediction

    def predict(self, size: int | None) -> MemoryPoint:
        """A point, known or new; ``why_not`` says why the program cannot do a step of that size."""
        size = self.ready.get("samples") if size is None and self.ready else size
        if size in self.points and self.ready:
            return self.points[size]
        answer = self._ask_worker(size)
        point = MemoryPoint(
            answer.get("batch", size),
            answer.get("peak_bytes"),
            answer.get("kinds", {}),
            answer.get("by_module", {}),
            answer.get("why_not", ""),
        )
        self.guessed_values.update(answer.get("guessed", ()))
        self.uses_closures |= answer.get("unit") == "backward"
        self.points[point.batch_size] = point
        return point

    def _ask_worker(self, size: int | None) -> dict[str, Any]:
        self.stage(
            "predicting",
            f"a step with {size} samples a batch, for shapes alone"
            if size
            else "a step as it is, for shapes alone",
        )
        try:
            trial = self.trial or self._start_trial()
            if self.ready["why_not"]:
                return {"why_not": self.ready["why_not"]}
            if size is not None and self.ready["samples"] is None:
                why = (
                    "the program makes its batches without a DataLoader, so flatout cannot change their size"
                )
                return {"why_not": why}
            return trial.ask({"do": "predict_memory", "batch": size}, seconds() + STEPS_TIMEOUT_S)
        except ProgramGone as gone:
            self._close_trial()
            if not self.ready:
                goal, remedy = "the memory of a step cannot be predicted", "Check that this command trains"
                raise unmeasured_error(gone.record, goal, remedy) from None
            return {"why_not": gone.record.error_line}

    def _start_trial(self) -> Trial:
        self.trial = trial = Trial(
            self.command,
            self.job.new_trial(),
            Plan(),
            self.facts,
            TrialOptions(entry=ENTRY, requested={"cuda": self.options.cuda}),
        )
        trial.start()
        self.ready = trial.wait_ready(seconds() + START_TIMEOUT_S)
        return trial

    def _close_trial(self) -> None:
        if self.trial is not None:
            trial, self.trial = self.trial, None
            trial.close()

    # -- the limit

    def _apply_limit(self) -> None:
        record, limit = self.record, self.options.limit_bytes
        if limit is not None:
            record.limit_bytes, record.limit_source = limit, "asked for"
        elif (gpu := self.facts.gpu(self.ready.get("device_index"))) is not None and (
            record.device == "cuda" or record.simulated
        ):
            record.limit_bytes, record.limit_source = gpu.memory_bytes, gpu.name
        base = self.points[record.own_size]
        if record.limit_bytes is None or base.peak_bytes is None:
            return
        limit_bytes = record.limit_bytes
        if record.own_size is not None and not base.why_not:
            self._find_largest(limit_bytes, record.own_size)
        record.advice = advice(base, limit_bytes, record.largest)

    def _find_largest(self, limit_bytes: int, script_size: int) -> None:
        requested_sizes = set(self.points)

        def peak_of(size: int) -> int:
            point = self.predict(size)
            if point.peak_bytes is None:
                raise LookupError(point.why_not)
            return point.peak_bytes

        try:
            self.record.largest = largest_that_fits(peak_of, limit_bytes, script_size)
        except LookupError as error:
            self.record.notes.append(f"the largest batch that fits is unknown: {error}")
        if self.record.largest:
            self.record.largest_peak_bytes = self.points[self.record.largest].peak_bytes
        self.points = {
            size: point
            for size, point in self.points.items()
            if size in requested_sizes or size == self.record.largest
        }

    # -- measuring

    def _measure(self, base: MemoryPoint) -> None:
        """Measure the script's own batch size, and the size farthest from it that fits well."""
        record = self.record
        if record.simulated:
            record.notes.append("nothing was measured: this machine has no such device")
            return
        if (base.peak_bytes or 0) <= self._safe_bytes():
            self._measure_point(base, Plan())
            add_overhead(record, base, self.options.sizes)
        else:
            base.measured_why_not = "its step is not expected to fit"
        farthest = self._farthest_point(base)
        if farthest is not None:
            self._measure_point(
                farthest,
                Plan((Choice("batch_size", {"size": farthest.batch_size, "loader": self.ready["loader"]}),)),
            )

    def _safe_bytes(self) -> float:
        """Bytes of a step that may be tried on this machine."""
        return SAFE_SHARE * (
            (self.record.limit_bytes if self.record.device == "cuda" else self.facts.memory_bytes) or 2**62
        )

    def _farthest_point(self, base: MemoryPoint) -> MemoryPoint | None:
        if base.batch_size is None or self.ready.get("loader") is None:
            return None
        max_samples = self.ready["length"] or 2**62
        points = [self.points[size] for size in self.options.sizes if size != base.batch_size]
        fitting = [
            point
            for point in points
            if point.peak_bytes is not None
            and point.peak_bytes <= self._safe_bytes()
            and (point.batch_size or 0) <= max_samples
        ]
        own_size = base.batch_size or 1
        return max(fitting, key=lambda p: abs(log((p.batch_size or 1) / own_size)), default=None)

    def _measure_point(self, point: MemoryPoint, plan: Plan) -> None:
        self.stage(
            "measuring",
            f"real steps with {point.batch_size} samples a batch"
            if point.batch_size
            else "real steps as they are",
        )
        deadline_s = seconds() + self.options.budget_s
        try:
            with Trial(self.command, self.job.new_trial(), plan, self.facts) as trial:
                ready = trial.wait_ready(deadline_s)
                if len(plan) and not ready["applied"]:
                    point.measured_why_not = (
                        ready["skipped"][0]["reason"]
                        if ready["skipped"]
                        else "the loader cannot be given another batch size"
                    )
                    return
                recorded = trial.run_probe("peak", deadline_s, ticks=MEASURED_TICKS)
        except ProgramGone as gone:
            point.measured_why_not = gone.record.error_line
            return
        if recorded.get("peak_bytes"):
            point.measured_bytes = int(recorded["peak_bytes"])
        else:
            point.measured_why_not = recorded.get("why_not") or "too few steps were recorded"

    def _add_notes(self) -> None:
        record, note = self.record, self.record.notes.append
        if record.simulated or record.device == "cuda":
            note("the CUDA context, cuDNN's workspaces and fragmentation come on top")
        if record.simulated:
            note(
                "the program ran on the CPU; operators with other kernels on a GPU may save other tensors there"
            )
        if self.uses_closures:
            note(
                "a step of this program is a closure; one pass was predicted, and the optimizer's memory of further passes comes on top"
            )
        length = self.ready.get("length")
        if length and any((point.batch_size or 0) > length for point in record.points):
            note(f"the data set has {length} samples; larger batches are predicted by repeating them")
        if self.guessed_values:
            note(
                f"some values that the program reads are unknown without computing ({', '.join(sorted(self.guessed_values))}); if more "
                "or fewer elements could be selected, all are"
            )


def add_overhead(record: MemoryForecast, base: MemoryPoint, requested: Sequence[int]) -> None:
    """Add to other sizes what the real step took beyond its prediction: it hardly grows with the batch."""
    predicted = base.peak_bytes or 0
    overhead = (base.measured_bytes or 0) - predicted
    if record.device != "cuda" or overhead <= 0 or not predicted:
        return
    record.notes[0] = (
        f"cuDNN's workspaces and fragmentation took {sizes.size(overhead)} of the measured step; other sizes include them. "
        "The CUDA context comes on top"
    )
    for point in record.points:
        if point is base or point.peak_bytes is None:
            continue
        more = (point.batch_size or 0) - (base.batch_size or 0)
        if point.batch_size == record.largest and more > 0 and point.batch_size not in requested:
            growth = point.peak_bytes - predicted
            fewer = -(-overhead * more // max(1, growth))
            point.batch_size = record.largest = (point.batch_size or 0) - fewer
            point.peak_bytes -= fewer * growth // more
        point.peak_bytes += overhead
        point.kinds["cuDNN and fragmentation"] = overhead
        if point.batch_size == record.largest:
            record.largest_peak_bytes = point.peak_bytes


def advice(base: MemoryPoint, limit_bytes: int, largest: int | None) -> str:
    """A sentence with advice; empty if the script's own batch fits."""
    if base.peak_bytes is None or base.peak_bytes <= limit_bytes:
        return ""
    state_bytes = sum(
        base.kinds.get(kind, 0) for kind in ("parameters", "buffers", "optimizer state", "gradients")
    )
    if state_bytes > limit_bytes:
        return (
            "Parameters, gradients and optimizer state alone are larger than the limit, so no batch fits: use lower precision, an optimizer with less state, "
            "or sharding."
        )
    if largest and base.batch_size:
        micro = -(-base.batch_size // largest)
        return (
            f"{micro} micro-batches of at most {largest} samples with accumulation keep the effective batch of {base.batch_size}; "
            f"{REMEDIES['activations'][0].lower()}{REMEDIES['activations'][1:]}."
        )
    kind = max(REMEDIES, key=lambda kind: base.kinds.get(kind, 0))
    return f"{REMEDIES[kind]}; lower precision (bf16) roughly halves the activations."
