"""`flatout batch`: measures speed and memory at other batch sizes, and the noise of the gradients.

own        the unchanged program: the training loader, its batch size, memory of a step, gradient noise
explore    each other size in its own program, smaller and larger: does it run, fit, and gain speed
passes     fresh programs of all sizes that fit are interleaved, one runs while the others are paused, as
           often as time allows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.batch_curve import fill_record
from flatout.measure.clock import seconds
from flatout.measure.disturbance import Disturbance
from flatout.measure.load import available_bytes
from flatout.measure.noise_scale import noise_scale
from flatout.measure.statistics import Round, block_ms
from flatout.schema import sizes
from flatout.schema.batch import BatchPoint, BatchRecord, NoiseScale
from flatout.schema.facts import Facts
from flatout.schema.records import TrialRecord
from flatout.trial.blocks import PREFETCHED_BATCHES
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.batch_programs import (
    FREE_SHARE,
    TIMEOUT_S,
    TURN_S,
    TURNS,
    BatchPrograms,
    BatchTrial,
    SizeFailed,
    mark_if_too_big,
    size_error,
)
from flatout.tune.endings import end_reason, unmeasured_error

START_S = 600.0
EXPLORE_TURNS = 2
EXPLORE_SHARE = 0.45  # of the budget; the rest is for passes
OVERRUN_S = 60.0  # by which the first comparison may exceed the budget
MEMORY_TICKS = 4
MAX_PASSES = 5
SIZE_FACTORS = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0)  # of the program's own size, in the order of trial
NOISE_SHARE = 0.15  # of the budget, for the gradient noise
NOISE_STEP_COST = 2.0  # times the length of an undisturbed step
MOST_NOISE_SHARE = 0.4  # of the budget, if steps are slow
FEWEST_NOISE_STEPS, MOST_NOISE_STEPS = 12, 256
MIN_GAIN = 1.03  # doubling the batch twice for less than this ends the search for larger sizes


@dataclass(frozen=True)
class BatchOptions:
    """The options of `flatout batch`.

    ``sizes`` empty: multiples and fractions of the program's own size. ``limit_bytes`` None: the device's
    memory, or the free memory of this machine.
    """

    sizes: tuple[int, ...] = ()
    budget_s: float = 300.0
    limit_bytes: int | None = None
    at_step: int = 0


class BatchCurve:
    """Measures the curve; ``run`` fills the record.

    Raises ProgramFailed if the unchanged program fails, and NothingMeasured if it does not train.
    """

    def __init__(
        self,
        command: Command,
        job: JobFolder,
        facts: Facts,
        record: BatchRecord,
        options: BatchOptions,
        stage: Callable[[str, str], None] = lambda name, detail: None,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self.facts, self.record, self.options = facts, record, options
        self.disturbance = Disturbance(facts.cores)
        self.stage, self.save = stage, save
        self.end_s = seconds() + options.budget_s
        self.explore_until_s = seconds() + EXPLORE_SHARE * options.budget_s
        self.passes: list[dict[int, list[float]]] = []
        self.own_repeats: list[list[Round]] = []
        self.programs = BatchPrograms(command, job, facts, record, self.end_s)

    def run(self) -> BatchRecord:
        turn_ms: dict[int, list[float]] = {}
        self.disturbance.sample()
        try:
            self._measure_plain(turn_ms)
            if not self.record.why_no_curve:
                self._explore(turn_ms)
                self._run_passes()
        finally:
            self.programs.dismiss(self.programs.paused)
        if not self.passes and turn_ms:
            self.passes = [turn_ms]
            self.record.notes.append(
                "there was no time to interleave the programs, so each size was measured once, one after another: "
                "the machine may have changed in between"
            )
        fill_record(self.record, self.passes, self.own_repeats)
        self.record.status = "done"
        self.record.disturbance = self.disturbance.beside
        return self.record

    # -- the program as it is

    def _measure_plain(self, turn_ms: dict[int, list[float]]) -> None:
        record = self.record
        trial = self.programs.plain_trial()
        try:
            self.stage("starting", "the program as it is, until its steps are steady")
            start_s = seconds()
            ready = trial.start().wait_ready(start_s + START_S)
            program = BatchTrial(0, trial, seconds() - start_s, ready["tick_ms"])
            self.programs.paused.append(program)
            record.device, self.programs.max_copies = ready["device"], ready["max_copies"]
            self._find_loader(trial.ask({"do": "options"}, seconds() + TIMEOUT_S), ready)
            if record.own_size is not None:
                program.size, program.prefetched = record.own_size, self.programs.prefetched
                record.points.append(BatchPoint(record.own_size))
                self._measure_size(program, record.points[0])
                turn_ms[record.own_size] = self._per_sample(program)
        except BaseException as error:
            trial.close()
            if isinstance(error, ProgramGone):
                what = "batch sizes could not be measured"
                raise unmeasured_error(
                    error.record, what, "Let it train longer, or reduce --budget"
                ) from None
            raise
        try:
            record.noise = observe_noise(
                trial, ready["tick_ms"], self.options.at_step, self.options.budget_s, self.stage
            )
        except ProgramGone as gone:
            record.noise.why_not = f"the program ended during the measurement: {end_reason(gone)}"
        self.programs.dismiss([program])
        self.save()

    def _find_loader(self, answers: dict[str, Any], ready: dict[str, Any]) -> None:
        record, answer, context = self.record, answers["options"]["batch_size"], answers["context"]
        self.disturbance.observe(context)
        if ready["unit"] != "step":
            record.why_no_curve = "a step of this program is a closure that lasts seconds (LBFGS), so the batch of a step is unknown"
        elif "skip" in answer:
            record.why_no_curve = answer["skip"]
        if record.why_no_curve:
            return
        record.loader = context["training_loader"]
        if record.loader is None or record.loader >= len(context["loaders"]):
            record.why_no_curve = f"the training loader is number {record.loader} of the program's loaders; there are too many to tell them apart"
            return
        loader = context["loaders"][record.loader]
        record.own_size, record.dataset_samples = loader["batch_size"], loader["length"]
        self.programs.prefetched = PREFETCHED_BATCHES * loader["num_workers"]
        gpu = self.facts.gpu(context["device_index"]) if record.device == "cuda" else None
        record.limit_bytes = self.options.limit_bytes or (gpu.memory_bytes if gpu else available_bytes())
        record.limit_source = (
            "given" if self.options.limit_bytes else "the device's" if gpu else "free on this machine"
        )

    # -- one size in one program

    def _measure_size(self, program: BatchTrial, point: BatchPoint) -> None:
        self.stage("exploring", f"{point.size} samples a batch")
        self.programs.costs_s.setdefault(point.size, program.startup_s)
        for _ in range(EXPLORE_TURNS):
            program.measure_turn()
        record = TrialRecord.from_json(program.trial.ask({"do": "record"}, seconds() + TIMEOUT_S)["record"])
        self._note_samples(record, point)
        recorded = program.trial.run_probe(
            "memory", seconds() + TIMEOUT_S + MEMORY_TICKS * program.tick_ms, ticks=MEMORY_TICKS
        )
        memory = recorded.get("memory") or {}
        point.peak_bytes, point.retries = memory.get("peak_bytes"), memory.get("retries")
        if self.record.device == "cuda" and record.peak_memory_bytes:
            point.peak_bytes = record.peak_memory_bytes
        point.step_ms = block_ms(program.turn_ms)
        mark_if_too_big(point, self.record)

    def _note_samples(self, record: TrialRecord, point: BatchPoint) -> None:
        optimizer = record.phases.get("optimizer") or {}
        point.optimizer_ms = optimizer.get("median_ms")
        if point.size == self.record.own_size:
            batches = round((record.samples_per_step or point.size) / point.size)
            self.record.effective = point.size * max(1, batches)
        expected = (self.record.effective or point.size) / (self.record.own_size or point.size) * point.size
        # The last batch of an epoch may be smaller. A first tensor that does not count samples is ignored.
        samples = record.samples_per_step
        point.samples_per_step = samples if samples and 0.5 * expected <= samples <= expected else expected

    def _per_sample(self, program: BatchTrial) -> list[float]:
        point = self.record.point(program.size)
        samples = point.samples_per_step if point is not None and point.samples_per_step else program.size
        return [ms / samples for ms in program.turn_ms]

    @property
    def own_point(self) -> BatchPoint:
        return self.record.point(self.record.own_size) or BatchPoint(self.record.own_size or 1)

    # -- each size once

    def _explore(self, turn_ms: dict[int, list[float]]) -> None:
        why_no_larger = ""  # why no larger size is tried
        for size in self._sizes():
            point = BatchPoint(size)
            larger = size > (self.record.own_size or 0)
            if larger and why_no_larger and not self.options.sizes:
                continue
            self.record.points.append(point)
            try:
                self._check_size(size)
                if larger and why_no_larger:
                    raise SizeFailed("too big", why_no_larger)
                program = self.programs.start_paused(size)
                try:
                    self._measure_size(program, point)
                except ProgramGone as gone:
                    self.programs.dismiss([program])
                    raise size_error(gone.record) from None
                turn_ms[size] = self._per_sample(program)
                self.programs.dismiss([program])
            except SizeFailed as error:
                point.status, point.why = error.status, error.why
            if larger and point.status in ("too big", "out of memory"):
                why_no_larger = f"{size} samples a batch already did not fit"
            elif larger and not self.options.sizes and _no_gain(turn_ms):
                why_no_larger = "doubling the batch size gave no speed-up twice in a row"
            self.save()
        self.record.points.sort(key=lambda point: point.size)

    def _sizes(self) -> list[int]:
        own_size = self.record.own_size or 1
        sizes = self.options.sizes or tuple(
            int(own_size * factor) for factor in SIZE_FACTORS if own_size * factor >= 1
        )
        others = [size for size in dict.fromkeys(sizes) if size != own_size]
        return (
            others
            if not self.options.sizes
            else sorted(others, key=lambda size: max(size / own_size, own_size / size))
        )

    def _check_size(self, size: int) -> None:
        """Raise SizeFailed if a size need not be tried: no such batch, probably too large, or no time."""
        record = self.record
        if record.dataset_samples is not None and size > record.dataset_samples:
            raise SizeFailed("no such batch", f"the data set has {record.dataset_samples:,} samples")
        peaks = sorted((p.size, p.peak_bytes) for p in record.points if p.peak_bytes)
        if peaks and record.limit_bytes and size > peaks[-1][0]:
            peak = _extrapolated_bytes(peaks, size)
            if peak > (1 - FREE_SHARE) * record.limit_bytes:
                raise SizeFailed(
                    "too big",
                    f"extrapolated from smaller sizes, its peak is about {sizes.size(peak)}, and {sizes.size(record.limit_bytes)} "
                    f"are {'the limit' if record.limit_source == 'given' else record.limit_source}",
                )
        # One point is no curve
        first_other = not any(point.step_ms for point in record.points if point.size != record.own_size)
        cost_s = self._cost_s(size) + 2 * MEMORY_TICKS * self._step_s(size)
        if cost_s > self.options.budget_s + OVERRUN_S or (
            not first_other and seconds() + cost_s > self.explore_until_s
        ):
            raise SizeFailed("no time", "the budget ran out first; increase --budget")

    def _cost_s(self, size: int) -> float:
        return self.programs.costs_s.get(size, self.programs.costs_s[self.own_point.size]) + TURNS * max(
            TURN_S, self._step_s(size)
        )

    def _step_s(self, size: int) -> float:
        point = self.record.point(size)
        step_ms = (
            point.step_ms
            if point is not None and point.step_ms
            else (self.own_point.step_ms or 0.0) * max(1.0, size / self.own_point.size)
        )
        return step_ms / 1000

    # -- all sizes in turns

    def _run_passes(self) -> None:
        """Run passes of fresh programs. In each, the own size runs twice, against itself."""
        own_size = self.own_point.size
        sizes = [point.size for point in self.record.points if point.fits]
        cost_s = sum(map(self._cost_s, [*sizes, own_size]))
        while len(self.passes) < MAX_PASSES and seconds() + cost_s < self.end_s and len(sizes) > 1:
            start_s = seconds()
            self.stage(
                "comparing",
                f"pass {len(self.passes) + 1}: {', '.join(map(str, sizes))} samples a batch, in fresh programs",
            )
            remaining, measured = (
                [*sizes, own_size] if len(self.passes) % 2 == 0 else [own_size, *sizes[::-1]],
                [],
            )
            while remaining:
                group = self.programs.start_group(remaining)
                measured += self.programs.take_turns(group)
            self.disturbance.sample()
            if not self._note_pass(measured, own_size):
                return
            cost_s = seconds() - start_s

    def _note_pass(self, programs: Sequence[BatchTrial], own_size: int) -> bool:
        own_programs = [program for program in programs if program.size == own_size]
        if own_programs:
            # The own size runs twice; its first visit counts
            self.passes.append({program.size: self._per_sample(program) for program in reversed(programs)})
            self.own_repeats += [
                [Round(a, b) for a, b in zip(own_programs[0].turn_ms, other.turn_ms, strict=False)]
                for other in own_programs[1:]
            ]
        return bool(own_programs)


def _no_gain(turn_ms: dict[int, list[float]]) -> bool:
    """Whether the two largest sizes gave almost no speed-up over the size before them."""
    ordered = [block_ms(turn_ms[size]) for size in sorted(turn_ms)]
    return len(ordered) >= 3 and ordered[-3] < MIN_GAIN * min(ordered[-2:])


def _extrapolated_bytes(peaks: Sequence[tuple[int, int]], size: int) -> float:
    """Extrapolate the bytes to a larger size from the two largest measured sizes, or in proportion to one."""
    (smaller, smaller_bytes), (larger, larger_bytes) = peaks[-2] if len(peaks) > 1 else (0, 0), peaks[-1]
    return larger_bytes + max(0.0, (larger_bytes - smaller_bytes) / (larger - smaller)) * (size - larger)


def observe_noise(
    trial: Trial, tick_ms: float, at_step: int, budget_s: float, stage: Callable[[str, str], None]
) -> NoiseScale:
    """Measure the gradient noise scale; first train on to ``at_step`` if it is ahead. Raises ProgramGone."""
    tick_s = max(tick_ms, 1e-3) / 1000
    steps_ahead = at_step - trial.ticks_done
    if steps_ahead * tick_s > budget_s:
        return NoiseScale(
            why_not=f"step {at_step:,} is {steps_ahead * tick_s:.0f} s away, beyond the budget; increase --budget"
        )
    if steps_ahead > 0:
        stage("training on", f"to step {at_step:,}, where the gradients are measured")
        trial.run_ticks(steps_ahead, seconds() + TIMEOUT_S + 30 * steps_ahead * tick_s)
    if NOISE_STEP_COST * FEWEST_NOISE_STEPS * tick_s > MOST_NOISE_SHARE * budget_s:
        return NoiseScale(
            why_not=f"at least {FEWEST_NOISE_STEPS} steps are needed, and one lasts {tick_s:.2g} s; increase --budget"
        )
    steps = max(
        FEWEST_NOISE_STEPS, min(MOST_NOISE_STEPS, int(NOISE_SHARE * budget_s / (NOISE_STEP_COST * tick_s)))
    )
    stage("measuring", f"the gradients of {steps} steps, with frozen weights")
    recorded = trial.run_probe("noise", seconds() + TIMEOUT_S + 60 * steps * tick_s, ticks=steps)
    if recorded.get("why_not"):
        return NoiseScale(step=trial.ticks_done, why_not=recorded["why_not"])
    scale = noise_scale(recorded["products"], recorded["squares"], recorded["batch"] or 1)
    return NoiseScale(
        recorded["step"],
        recorded["batch"],
        recorded["gradients"],
        scale.value,
        scale.low,
        scale.high,
        scale.gradient,
        scale.trace,
    )
