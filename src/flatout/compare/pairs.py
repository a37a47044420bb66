"""Measures two programs in pairs of fresh processes with the same seed, until the question is answered.

Each process starts alone, so its start-up is measured without the other's. Then their blocks alternate
(`flatout.tune.comparison`) while the other is stopped. The order within a pair changes from pair to pair.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.compare.sides import Side
from flatout.job.folder import JobFolder
from flatout.measure.clock import seconds
from flatout.measure.disturbance import Disturbance
from flatout.measure.statistics import block_ms, estimate
from flatout.schema.errors import FlatoutError, NothingMeasured
from flatout.schema.facts import Facts
from flatout.schema.records import Record, TrialRecord
from flatout.trial.blocks import PREFETCHED_BATCHES, Watcher
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions
from flatout.tune.comparison import alternate, complete_rounds
from flatout.tune.endings import failure_error, unmeasured_error
from flatout.tune.interleaver import Interleaver

MIN_ROUNDS = 4  # of a pair
MIN_S = 2.8  # of a pair's blocks; processes differ too, so more pairs serve better
MAX_S = 10.0
MAX_HALF_WIDTH = 0.012  # of the interval of a pair's change; narrower ones would not show more
START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 60.0
MIN_KEPT_ROUNDS = 2
MIN_RECORDED, MAX_RECORDED, RECORDED_MS = 3, 20, 1000.0  # steps of each program whose operators are recorded
TRAINING_STEPS, MIN_TRAINING_STEPS, TRAINING_S = 128, 17, 60.0  # of each program whose training is compared


@dataclass
class Run(Record):
    """One process of a side. ``blocks_ms``: a step's time in each block. ``operations``: the probe's answer."""

    record: TrialRecord
    start_s: float
    blocks_ms: list[float]
    operations: dict[str, Any] | None = None

    @property
    def log_ms(self) -> float:
        """The logarithm of the mean step time in milliseconds. Evaluations and checkpoints are left out."""
        return math.log(block_ms(self.blocks_ms))


@dataclass
class Pair:
    """Two processes with the same seed. ``b`` is absent if only one side is measured."""

    seed: int
    a: Run
    b: Run | None = None

    @property
    def log_change(self) -> float:
        """The logarithm of B's step time over A's; with one side, of A's step time."""
        return self.b.log_ms - self.a.log_ms if self.b is not None else self.a.log_ms


class PairTimer:
    """Runs pairs of two sides, or single processes of one side (``sides`` then has one)."""

    def __init__(
        self, sides: Sequence[Side], job: JobFolder, facts: Facts, watcher: Watcher, sketches: bool = False
    ) -> None:
        self.sides, self.job, self.facts, self.watcher = sides, job, facts, watcher
        self.interleaver = Interleaver(sides[0].command, job, facts)
        self.disturbance, self.sketches = Disturbance(facts.cores), sketches
        self.records_operators, self.not_recorded = False, ""  # why, for the last process
        self.pairs: list[Pair] = []
        self.pair_s = 0.0  # of the last one
        self.slowest_ms = 1e-3  # time of a step
        self.until_s = math.inf
        self.one_at_a_time = False  # two processes do not fit into the memory of the device together

    def run(self, until_s: float, stop_rule: Callable[[Sequence[Pair]], bool], min_pairs: int) -> list[Pair]:
        """Measure pairs until ``stop_rule`` or the time is up; at least ``min_pairs``.

        Raises NothingMeasured if a side cannot be measured. ``pairs`` then has those that were."""
        self.until_s = until_s
        try:
            while len(self.pairs) < min_pairs or (
                not stop_rule(self.pairs) and seconds() + 0.8 * self.pair_s < until_s
            ):
                start_s, number = seconds(), len(self.pairs)
                noun = "pair" if len(self.sides) > 1 else "process"
                self.watcher.stage("measuring", f"{noun} {number + 1}")
                self.disturbance.sample()
                self.pairs.append(self._pair(number))
                self.pair_s = seconds() - start_s
            return self.pairs
        finally:
            self.interleaver.close()

    def repeat(self, seed: int, perturbation: float = 0.0) -> TrialRecord | None:
        """Run A a second time with a known seed, as far as before; None if it fails.

        ``perturbation``: perturbed from the first step on (`flatout.guard.perturb`)."""
        steps = self.pairs[seed].a.record.warmup_steps + self.pairs[seed].a.record.steps
        trial = self._start(self.sides[0], seed, perturbation)
        try:
            self.interleaver.run(trial, max(1, steps - trial.ticks_done))
            return trial.finish()
        except ProgramGone as gone:
            return gone.record if gone.record.status == "ended" else None
        finally:
            self.interleaver.dismiss(trial)

    def _pair(self, seed: int) -> Pair:
        order = list(range(len(self.sides)))[:: 1 if seed % 2 == 0 else -1]
        runs: dict[int, Run] = {}
        for group in [[i] for i in order] if self.one_at_a_time else [order]:
            runs |= self._measure_group(group, seed)
        return Pair(seed, runs[0], runs.get(1)) if len(runs) == len(self.sides) else self._pair(seed)

    def _measure_group(self, group: Sequence[int], seed: int) -> dict[int, Run]:
        trials: dict[int, Trial] = {}
        start_times: dict[int, float] = {}
        try:
            for i in group:
                trials[i] = self._start(self.sides[i], seed)
                start_times[i] = seconds() - trials[i].started_s
                try:
                    self._set_block_length(trials[i])
                except ProgramGone as gone:
                    raise _side_error(self.sides[i], gone.record) from None
                if len(group) > len(trials) and trials[i].ready["max_copies"] < 2:
                    self.one_at_a_time = True
                    return {}
            blocks = self._blocks(trials)
            recorded = {i: self._record_operators(trial) for i, trial in trials.items()}
            for trial in trials.values() if self.sketches else ():
                self._train(trial)
            records = {i: self._finish(trial, self.sides[i]) for i, trial in trials.items()}
            return {i: Run(record, start_times[i], blocks[i], recorded[i]) for i, record in records.items()}
        finally:
            for trial in trials.values():
                self.interleaver.dismiss(trial)

    def _record_operators(self, trial: Trial) -> dict[str, Any] | None:
        """Record the operators of some steps, if that is asked for and possible."""
        if not self.records_operators:
            return None
        wait = self.interleaver.prefetched_ticks
        active = max(MIN_RECORDED, 2 * wait, min(MAX_RECORDED, int(RECORDED_MS / self.slowest_ms)))
        request = {"ticks": wait + active + 2, "schedule": (wait, 1, active), "by_line": True}
        deadline_s = self.interleaver.deadline(10 * (wait + active)) + ANSWER_TIMEOUT_S
        try:
            answer = trial.run_probe("operations", deadline_s, **request)
        except ProgramGone as gone:
            answer = {"why_not": gone.record.reason}
        self.not_recorded = answer.get("why_not", "")
        return answer if answer.get("operations") else None

    def _train(self, trial: Trial) -> None:
        """Go on to `TRAINING_STEPS`, or as far as `TRAINING_S` allows: what acts later is not compared."""
        possible = int(1000 * TRAINING_S / self.slowest_ms)
        missing = max(MIN_TRAINING_STEPS, min(TRAINING_STEPS, possible)) - trial.ticks_done
        try:
            if missing > 0:
                self.interleaver.run(trial, missing)
        except ProgramGone as gone:
            if gone.record.status != "ended":
                raise

    def _start(self, side: Side, seed: int, perturbation: float = 0.0) -> Trial:
        options = TrialOptions(seed, reseed=True, perturbation=perturbation, sketches=self.sketches)
        trial = Trial(side.command, self.job.new_trial(), side.plan, self.facts, options)
        self.interleaver.start_trial(trial)
        gone = self.interleaver.wait_all_ready([trial], START_TIMEOUT_S)[0]
        if gone is not None:
            raise _side_error(side, gone.record)
        for skipped in trial.ready["skipped"]:
            why = f"{skipped['name']}: {skipped['reason']}"
            raise NothingMeasured(f"{side.label}: the plan cannot be applied: {why}")
        return trial

    def _set_block_length(self, trial: Trial) -> None:
        """Choose one length of a block for both sides, so that they do the same work."""
        interleaver = self.interleaver
        self.slowest_ms = max(self.slowest_ms, trial.ready["tick_ms"])
        interleaver.tick_ms, interleaver.unit = self.slowest_ms, trial.ready["unit"]
        if not self.pairs:
            context = trial.ask({"do": "record"}, seconds() + ANSWER_TIMEOUT_S)["record"]["context"]
            trial.pause()
            self.disturbance.observe(context)
            workers = max((loader["num_workers"] for loader in context["loaders"]), default=0)
            interleaver.prefetched_ticks = max(interleaver.prefetched_ticks, PREFETCHED_BATCHES * workers)

    def _blocks(self, trials: Mapping[int, Trial]) -> dict[int, list[float]]:
        """Alternate blocks of these programs. A program that ends leaves what it has."""
        start_s = seconds()
        results = alternate(
            self.interleaver,
            list(trials.values()),
            min(start_s + MAX_S, self.until_s),
            lambda rounds: _pair_decided(rounds, seconds() - start_s),
        )
        rounds = complete_rounds(results)
        for i, result in zip(trials, results, strict=True):
            if result.end_record is not None and (
                result.end_record.status != "ended" or len(rounds) < MIN_KEPT_ROUNDS
            ):
                raise _side_error(self.sides[i], result.end_record)
        quiet = complete_rounds(results, self.disturbance.limit)
        if len(quiet) >= MIN_KEPT_ROUNDS:
            rounds = quiet
        else:
            self.disturbance.add(block.busy for result in results for block in result.blocks)
        return {i: list(blocks) for i, blocks in zip(trials, zip(*rounds, strict=True), strict=True)}

    def _finish(self, trial: Trial, side: Side) -> TrialRecord:
        record = trial.finish()
        if record.status not in ("finished", "ended"):
            raise _side_error(side, record)
        return record


def _pair_decided(rounds: Sequence[tuple[float, ...]], spent_s: float) -> bool:
    if spent_s < MIN_S or len(rounds) < MIN_ROUNDS:
        return False
    # of one side: its own logarithms
    values = [math.log(times[-1]) - (math.log(times[0]) if len(times) == 2 else 0.0) for times in rounds]
    return estimate(values, 0.95).half_width <= MAX_HALF_WIDTH


def _side_error(side: Side, record: TrialRecord) -> FlatoutError:
    """The error for a side that cannot be measured.

    Never the exit code of the program: 1 would mean that a gate failed."""
    if record.status == "failed":
        headline = f"{side.label} fails (exit code {record.exit_code})"
        return NothingMeasured(str(failure_error(record, headline)))
    return unmeasured_error(record, f"{side.label} cannot be measured", "Compare longer runs")
