"""Measures two programs in pairs of fresh processes with the same seed, until the question is answered.

Each process starts alone, so its start-up is measured without the other's. Then their blocks alternate
(`flatout.tune.comparison`) while the other is stopped. The order within a pair changes from pair to pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flatout.compare.sides import Side
from flatout.job.folder import JobFolder
from flatout.measure.clock import seconds
from flatout.measure.statistics import block_ms, estimate
from flatout.schema.errors import FlatoutError, NothingMeasured
from flatout.schema.facts import Facts
from flatout.schema.records import Record, TrialRecord
from flatout.trial.blocks import PREFETCHED_BATCHES, Watcher
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions
from flatout.tune.comparison import alternate, whole_rounds
from flatout.tune.disturbance import Disturbance
from flatout.tune.gone import program_failed, why_not
from flatout.tune.interleaver import Interleaver

LEAST_ROUNDS = 4  # of a pair
LEAST_S = 2.8  # of a pair's blocks; processes differ too, so more pairs serve better
MOST_S = 10.0
PAIR_HALF = 0.012  # of the interval of a pair's change; narrower ones would not show more
START_TIMEOUT_S = 900.0
ANSWER_S = 60.0
FEWEST_ROUNDS = 2


@dataclass
class Run(Record):
    """One process of a side. ``blocks_ms``: the time of a step in each block."""

    record: TrialRecord
    start_s: float
    blocks_ms: list[float]

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

    def __init__(self, sides: Sequence[Side], job: JobFolder, facts: Facts, watcher: Watcher) -> None:
        self.sides, self.job, self.facts, self.watcher = sides, job, facts, watcher
        self.interleaver = Interleaver(sides[0].command, job, facts)
        self.disturbance = Disturbance(facts.cores)
        self.pairs: list[Pair] = []
        self.pair_s = 0.0  # of the last one
        self.slowest_ms = 1e-3  # time of a step
        self.until_s = math.inf
        self.apart = False  # two processes do not fit into the memory of the device together

    def run(self, until_s: float, enough: Callable[[Sequence[Pair]], bool], fewest: int) -> list[Pair]:
        """Measure pairs until ``enough`` or the time is up; at least ``fewest``.

        Raises NothingMeasured if a side cannot be measured. ``pairs`` then has those that were.
        """
        self.until_s = until_s
        try:
            while len(self.pairs) < fewest or (
                not enough(self.pairs) and seconds() + 0.8 * self.pair_s < until_s
            ):
                start_s, number = seconds(), len(self.pairs)
                self.watcher.stage(
                    "measuring", f"pair {number + 1}" if len(self.sides) > 1 else f"process {number + 1}"
                )
                self.disturbance.look()
                self.pairs.append(self._pair(number))
                self.pair_s = seconds() - start_s
            return self.pairs
        finally:
            self.interleaver.close()

    def again(self, seed: int) -> TrialRecord | None:
        """Run A a second time with a known seed, as far as before; None if it ends early."""
        steps = self.pairs[seed].a.record.warmup_steps + self.pairs[seed].a.record.steps
        trial = self._start(self.sides[0], seed)
        try:
            self.interleaver.run(trial, max(1, steps - trial.ticks_done))
            return trial.finish()
        except ProgramGone:
            return None
        finally:
            self.interleaver.dismiss(trial)

    def _pair(self, seed: int) -> Pair:
        order = list(range(len(self.sides)))[:: 1 if seed % 2 == 0 else -1]
        runs: dict[int, Run] = {}
        for group in [[at] for at in order] if self.apart else [order]:
            runs |= self._together(group, seed)
        return Pair(seed, runs[0], runs.get(1)) if len(runs) == len(self.sides) else self._pair(seed)

    def _together(self, group: Sequence[int], seed: int) -> dict[int, Run]:
        """Measure these sides in turns; nothing if they do not fit into memory together."""
        trials: dict[int, Trial] = {}
        started: dict[int, float] = {}
        try:
            for at in group:
                trials[at] = self._start(self.sides[at], seed)
                started[at] = seconds() - trials[at].started_s
                with _named(self.sides[at]):
                    self._pace(trials[at])
                if len(group) > len(trials) and trials[at].ready["copies"] < 2:
                    self.apart = True
                    return {}
            blocks = self._blocks(trials)
            return {
                at: Run(self._finished(trial, self.sides[at]), started[at], blocks[at])
                for at, trial in trials.items()
            }
        finally:
            for trial in trials.values():
                self.interleaver.dismiss(trial)

    def _start(self, side: Side, seed: int) -> Trial:
        """Start a process and bring it to its steady state; it is stopped on return."""
        trial = Trial(
            side.command, self.job.new_trial(), side.plan, self.facts, TrialOptions(seed, reseed=True)
        )
        self.interleaver.begin(trial)
        gone = self.interleaver.ready([trial], START_TIMEOUT_S)[0]
        if gone is not None:
            raise _lost(side, gone.record)
        for left in trial.ready["skipped"]:
            raise NothingMeasured(
                f"{side.label}: the plan cannot be applied: {left['name']}: {left['reason']}"
            )
        return trial

    def _pace(self, trial: Trial) -> None:
        """Choose one length of a block for both sides, so that they do the same work."""
        interleaver = self.interleaver
        self.slowest_ms = max(self.slowest_ms, trial.ready["tick_ms"])
        interleaver.tick_ms, interleaver.unit = self.slowest_ms, trial.ready["unit"]
        if not self.pairs:
            context = trial.ask({"do": "record"}, seconds() + ANSWER_S)["record"]["context"]
            trial.hold()
            workers = max((loader["num_workers"] for loader in context["loaders"]), default=0)
            interleaver.prefetched_ticks = max(interleaver.prefetched_ticks, PREFETCHED_BATCHES * workers)

    def _blocks(self, trials: Mapping[int, Trial]) -> dict[int, list[float]]:
        """Alternate blocks of these programs. A program that ends leaves what it has."""
        start_s = seconds()
        found = alternate(
            self.interleaver,
            list(trials.values()),
            min(start_s + MOST_S, self.until_s),
            lambda rounds: _enough(rounds, seconds() - start_s),
        )
        rounds = whole_rounds(found)
        for at, each in zip(trials, found, strict=True):
            if each.gone is not None and (each.gone.status != "ended" or len(rounds) < FEWEST_ROUNDS):
                raise _lost(self.sides[at], each.gone)
        return {at: list(blocks) for at, blocks in zip(trials, zip(*rounds, strict=True), strict=True)}

    def _finished(self, trial: Trial, side: Side) -> TrialRecord:
        record = trial.finish()
        if record.status not in ("finished", "ended"):
            raise _lost(side, record)
        return record


def _enough(rounds: Sequence[tuple[float, ...]], spent_s: float) -> bool:
    """Whether the rounds of a pair tell its change, as far as one pair can."""
    if spent_s < LEAST_S or len(rounds) < LEAST_ROUNDS:
        return False
    # of one side: its own logarithms
    values = [math.log(times[-1]) - (math.log(times[0]) if len(times) == 2 else 0.0) for times in rounds]
    return estimate(values, 0.95).half_width <= PAIR_HALF


@contextmanager
def _named(side: Side) -> Iterator[None]:
    """Name the side whose program was lost."""
    try:
        yield
    except ProgramGone as gone:
        raise _lost(side, gone.record) from None


def _lost(side: Side, record: TrialRecord) -> FlatoutError:
    """The error for a side that cannot be measured.

    Never the exit code of the program: 1 would mean that a gate failed.
    """
    if record.status == "failed":
        return NothingMeasured(
            str(program_failed(record, f"{side.label} fails (exit code {record.exit_code})"))
        )
    return why_not(record, f"{side.label} cannot be measured", "compare longer runs")
