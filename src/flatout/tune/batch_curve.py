"""`flatout batch`: measures speed and memory at other batch sizes, and the noise of the gradients.

    own        the unchanged program: the training loader, its batch size, memory of a step, gradient noise
    explore    each other size in its own program, smaller and larger: does it run, fit, and gain speed
    passes     fresh programs of all sizes that fit are interleaved, one runs while the others are paused, as
               often as time allows

A GPU's memory belongs to one program at a time; on a CPU as many programs live side by side as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.batch_curve import read
from flatout.measure.clock import seconds
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
    MARGIN,
    TIMEOUT_S,
    TURN_S,
    TURNS,
    BatchTrial,
    DidNotRun,
    Programs,
    did_not_run,
    judge,
)
from flatout.tune.gone import why_gone, why_not

START_S = 600.0
EXPLORING_TURNS = 2
EXPLORE_SHARE = 0.45  # of the budget; the rest is for passes
OVERRUN_S = 60.0  # by which the first comparison may exceed the budget
MEMORY_TICKS = 4
MOST_PASSES = 5
FACTORS = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0)  # of the program's own size, in the order of trial
NOISE_SHARE = 0.15  # of the budget, for the gradient noise
OBSERVED_STEP = 2.0  # times the length of an undisturbed step
MOST_NOISE_SHARE = 0.4  # of the budget, if steps are slow
FEWEST_NOISE_STEPS, MOST_NOISE_STEPS = 12, 256
GAIN = 1.03  # doubling the batch twice for less than this ends the search for larger sizes


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
        requested: BatchOptions,
        stage: Callable[[str, str], None] = lambda name, detail: None,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self.facts, self.record, self.requested = facts, record, requested
        self.stage, self.save = stage, save
        self.end_s = seconds() + requested.budget_s
        self.explore_until_s = seconds() + EXPLORE_SHARE * requested.budget_s
        self.passes: list[dict[int, list[float]]] = []
        self.again: list[list[Round]] = []
        self.programs = Programs(command, job, facts, record, self.end_s)

    def run(self) -> BatchRecord:
        explored: dict[int, list[float]] = {}
        try:
            self._own(explored)
            if not self.record.why_no_curve:
                self._explore(explored)
                self._take_turns()
        finally:
            self.programs.dismiss(self.programs.alive)
        if not self.passes and explored:
            self.passes = [explored]
            self.record.notes.append(
                "there was no time to interleave the programs, so each size was measured once, one after another: "
                "the machine may have changed in between"
            )
        read(self.record, self.passes, self.again)
        self.record.status = "done"
        return self.record

    # -- the program as it is ---------------------------------------------------------------------------------------------

    def _own(self, explored: dict[int, list[float]]) -> None:
        record = self.record
        trial = self.programs.own()
        try:
            self.stage("starting", "the program as it is, until its steps are steady")
            start_s = seconds()
            ready = trial.start().wait_ready(start_s + START_S)
            visit = BatchTrial(0, trial, seconds() - start_s, ready["tick_ms"])
            self.programs.alive.append(visit)
            record.device, self.programs.copies = ready["device"], ready["copies"]
            self._whose_size(trial.ask({"do": "options"}, seconds() + TIMEOUT_S), ready)
            if record.own_size is not None:
                visit.size, visit.prefetched = record.own_size, self.programs.prefetched
                record.points.append(BatchPoint(record.own_size))
                self._look(visit, record.points[0])
                explored[record.own_size] = self._per_sample(visit)
        except BaseException as error:
            trial.close()
            if isinstance(error, ProgramGone):
                raise why_not(error.record, "batch sizes could not be measured", "reduce --budget") from None
            raise
        try:
            record.noise = observe_noise(
                trial, ready["tick_ms"], self.requested.at_step, self.requested.budget_s, self.stage
            )
        except ProgramGone as gone:
            record.noise.why_not = f"the program ended during the measurement: {why_gone(gone)}"
        self.programs.dismiss([visit])
        self.save()

    def _whose_size(self, info: dict[str, Any], ready: dict[str, Any]) -> None:
        record, answer, context = self.record, info["options"]["batch_size"], info["context"]
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
        record.limit_bytes = self.requested.limit_bytes or (gpu.memory_bytes if gpu else available_bytes())
        record.limit_source = (
            "given" if self.requested.limit_bytes else "the device's" if gpu else "free on this machine"
        )

    # -- one size in one program ------------------------------------------------------------------------------------------

    def _look(self, visit: BatchTrial, point: BatchPoint) -> None:
        """Measure some turns, the phases and the memory of a step. Raises ProgramGone."""
        self.stage("exploring", f"{point.size} samples a batch")
        self.programs.costs_s.setdefault(point.size, visit.start_s)
        for _ in range(EXPLORING_TURNS):
            visit.turn()
        seen = TrialRecord.from_json(visit.trial.ask({"do": "record"}, seconds() + TIMEOUT_S)["record"])
        self._note(seen, point)
        recorded = visit.trial.listen(
            "memory", seconds() + TIMEOUT_S + MEMORY_TICKS * visit.tick_ms, ticks=MEMORY_TICKS
        )
        memory = recorded.get("memory") or {}
        point.peak_bytes, point.retries = memory.get("peak_bytes"), memory.get("retries")
        if self.record.device == "cuda" and seen.peak_memory_bytes:
            point.peak_bytes = seen.peak_memory_bytes
        point.step_ms = block_ms(visit.turns)
        judge(point, self.record)

    def _note(self, seen: TrialRecord, point: BatchPoint) -> None:
        optimizer = seen.phases.get("optimizer") or {}
        point.optimizer_ms = optimizer.get("median_ms")
        own = point.size == self.record.own_size
        if own:
            self.record.effective = point.size * max(
                1, round((seen.samples_per_step or point.size) / point.size)
            )
        whole = (self.record.effective or point.size) / (self.record.own_size or point.size) * point.size
        # The last batch of an epoch may be smaller. A first tensor that does not count samples is ignored.
        counted = seen.samples_per_step
        point.samples_per_step = counted if counted and 0.5 * whole <= counted <= whole else whole

    def _per_sample(self, visit: BatchTrial) -> list[float]:
        point = self.record.point(visit.size)
        samples = point.samples_per_step if point is not None and point.samples_per_step else visit.size
        return [ms / samples for ms in visit.turns]

    @property
    def own(self) -> BatchPoint:
        return self.record.point(self.record.own_size) or BatchPoint(self.record.own_size or 1)

    # -- each size once ---------------------------------------------------------------------------------------------------

    def _explore(self, explored: dict[int, list[float]]) -> None:
        no_more = ""  # why no larger size is tried
        for size in self._sizes():
            point = BatchPoint(size)
            larger = size > (self.record.own_size or 0)
            if larger and no_more and not self.requested.sizes:
                continue
            self.record.points.append(point)
            try:
                self._may(size)
                if larger and no_more:
                    raise DidNotRun("too big", no_more)
                visit = self.programs.enter(size)
                try:
                    self._look(visit, point)
                except ProgramGone as gone:
                    self.programs.dismiss([visit])
                    raise did_not_run(gone.record) from None
                explored[size] = self._per_sample(visit)
                self.programs.dismiss([visit])
            except DidNotRun as error:
                point.status, point.why = error.status, error.why
            if larger and point.status in ("too big", "out of memory"):
                no_more = f"{size} samples a batch already did not fit"
            elif larger and not self.requested.sizes and _no_gain(explored):
                no_more = "doubling the batch size gave no speed-up twice in a row"
            self.save()
        self.record.points.sort(key=lambda point: point.size)

    def _sizes(self) -> list[int]:
        own = self.record.own_size or 1
        asked = self.requested.sizes or tuple(int(own * factor) for factor in FACTORS if own * factor >= 1)
        found = [size for size in dict.fromkeys(asked) if size != own]
        return (
            found if not self.requested.sizes else sorted(found, key=lambda size: max(size / own, own / size))
        )

    def _may(self, size: int) -> None:
        """Raise DidNotRun if a size need not be tried: no such batch, probably too large, or no time."""
        record = self.record
        if record.dataset_samples is not None and size > record.dataset_samples:
            raise DidNotRun("no such batch", f"the data set has {record.dataset_samples:,} samples")
        known = sorted((p.size, p.peak_bytes) for p in record.points if p.peak_bytes)
        if known and record.limit_bytes and size > known[-1][0]:
            peak = _extended(known, size)
            if peak > (1 - MARGIN) * record.limit_bytes:
                raise DidNotRun(
                    "too big",
                    f"extrapolated from smaller sizes, its peak is about {sizes.size(peak)}, and {sizes.size(record.limit_bytes)} "
                    f"are {'the limit' if record.limit_source == 'given' else record.limit_source}",
                )
        # One point is no curve
        alone = not any(point.step_ms for point in record.points if point.size != record.own_size)
        cost_s = self._cost_s(size) + 2 * MEMORY_TICKS * self._step_s(size)
        if cost_s > self.requested.budget_s + OVERRUN_S or (
            not alone and seconds() + cost_s > self.explore_until_s
        ):
            raise DidNotRun("no time", "the budget ran out first; increase --budget")

    def _cost_s(self, size: int) -> float:
        """Estimate the seconds of a program at this size, from its start to its last turn."""
        return self.programs.costs_s.get(size, self.programs.costs_s[self.own.size]) + TURNS * max(
            TURN_S, self._step_s(size)
        )

    def _step_s(self, size: int) -> float:
        point = self.record.point(size)
        step_ms = (
            point.step_ms
            if point is not None and point.step_ms
            else (self.own.step_ms or 0.0) * max(1.0, size / self.own.size)
        )
        return step_ms / 1000

    # -- all sizes in turns -----------------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        """Run passes of fresh programs. In each, the own size runs twice, against itself."""
        own = self.own.size
        sizes = [point.size for point in self.record.points if point.fits]
        cost_s = sum(map(self._cost_s, [*sizes, own]))
        while len(self.passes) < MOST_PASSES and seconds() + cost_s < self.end_s and len(sizes) > 1:
            start_s = seconds()
            self.stage(
                "comparing",
                f"pass {len(self.passes) + 1}: {', '.join(map(str, sizes))} samples a batch, in fresh programs",
            )
            left, done = [*sizes, own] if len(self.passes) % 2 == 0 else [own, *sizes[::-1]], []
            while left:
                group = self.programs.entered(left)
                done += self.programs.take_turns(group)
            if not self._note_pass(done, own):
                return
            cost_s = seconds() - start_s

    def _note_pass(self, visits: Sequence[BatchTrial], own: int) -> bool:
        same = [visit for visit in visits if visit.size == own]
        if same:
            # The own size runs twice; its first visit counts
            self.passes.append({visit.size: self._per_sample(visit) for visit in reversed(visits)})
            self.again += [
                [Round(a, b) for a, b in zip(same[0].turns, other.turns, strict=False)] for other in same[1:]
            ]
        return bool(same)


def _no_gain(explored: dict[int, list[float]]) -> bool:
    """Whether the two largest sizes gave almost no speed-up over the size before them."""
    ordered = [block_ms(explored[size]) for size in sorted(explored)]
    return len(ordered) >= 3 and ordered[-3] < GAIN * min(ordered[-2:])


def _extended(known: Sequence[tuple[int, int]], size: int) -> float:
    """Extrapolate the bytes to a larger size from the two largest measured sizes, or in proportion to one."""
    (a, x), (b, y) = known[-2] if len(known) > 1 else (0, 0), known[-1]
    return y + max(0.0, (y - x) / (b - a)) * (size - b)


def observe_noise(
    trial: Trial, tick_ms: float, at_step: int, budget_s: float, stage: Callable[[str, str], None]
) -> NoiseScale:
    """Measure the gradient noise scale; first train on to ``at_step`` if it is ahead. Raises ProgramGone."""
    tick_s = max(tick_ms, 1e-3) / 1000
    ahead = at_step - trial.ticks_done
    if ahead * tick_s > budget_s:
        return NoiseScale(
            why_not=f"step {at_step:,} is {ahead * tick_s:.0f} s away, beyond the budget; increase --budget"
        )
    if ahead > 0:
        stage("training on", f"to step {at_step:,}, where the gradients are measured")
        trial.go(ahead, seconds() + TIMEOUT_S + 30 * ahead * tick_s)
    if OBSERVED_STEP * FEWEST_NOISE_STEPS * tick_s > MOST_NOISE_SHARE * budget_s:
        return NoiseScale(
            why_not=f"at least {FEWEST_NOISE_STEPS} steps are needed, and one lasts {tick_s:.2g} s; increase --budget"
        )
    steps = max(
        FEWEST_NOISE_STEPS, min(MOST_NOISE_STEPS, int(NOISE_SHARE * budget_s / (OBSERVED_STEP * tick_s)))
    )
    stage("measuring", f"the gradients of {steps} steps, with frozen weights")
    recorded = trial.listen("noise", seconds() + TIMEOUT_S + 60 * steps * tick_s, ticks=steps)
    if recorded.get("why_not"):
        return NoiseScale(step=trial.ticks_done, why_not=recorded["why_not"])
    found = noise_scale(recorded["products"], recorded["squares"], recorded["batch"] or 1)
    return NoiseScale(
        recorded["step"],
        recorded["batch"],
        recorded["gradients"],
        found.value,
        found.low,
        found.high,
        found.gradient,
        found.trace,
    )
