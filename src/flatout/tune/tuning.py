"""The state of one search, passed from stage to stage: the clock, the candidates, the measured blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.guard.batch_slices import PLAYS, samples_played
from flatout.guard.loss_curves import nan_loss
from flatout.guard.replica import SHARPENING_S, SLOW_MS, STEPS, STEPS_OF_A_LARGE_MODEL
from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio, TrialRecord
from flatout.schema.session import ComparisonRecord, SessionRecord
from flatout.trial.blocks import LeverFailed, Watcher
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.budget import USUAL_BUDGET_S, default_budget_s, gain_of_compilers
from flatout.tune.candidates import Candidate, in_order
from flatout.tune.comparison import ProgramRequest, ProgramResult, Row
from flatout.tune.disturbance import Disturbance
from flatout.tune.effects import Fitted, Space, TimedBlock, fit, ratio_of
from flatout.tune.goal import Goal, only
from flatout.tune.interleaver import Interleaver, RunningCandidate
from flatout.tune.limits import (
    CONFIRM_SHARE,
    FEWEST_PAIRS,
    FIT_SHARE,
    OVERRUN,
    PAIR_S,
    PAIRS,
    ROUNDS_OF_A_PAIR,
    THREE_PAIRS_SHARE,
    TWO_STARTS,
    WINDOWS_A_SEED,
)
from flatout.tune.prior import priors
from flatout.tune.remote import RemoteNodes


@dataclass
class Tuning:
    command: Command
    job: JobFolder
    facts: Facts
    session: SessionRecord
    goal: Goal
    watcher: Watcher = field(default_factory=Watcher)
    save_session: Callable[[SessionRecord], None] = lambda session: None
    base: Plan | None = None  # applies to every program of the search: how it is split over ranks
    alone: Command | None = None  # starts one process when ``command`` starts several
    elsewhere: RemoteNodes | None = None  # remote machines that run independent comparisons at the same time

    def __post_init__(self) -> None:
        self.start_s, self.budget_s = seconds() - self.session.spent_s, self.goal.budget_s or USUAL_BUDGET_S
        self.interleaver = Interleaver(self.command, self.job, self.facts, self.base, self.alone)
        self.candidates: dict[str, Candidate] = {}
        self.start_cost_s = 5.0  # from the start of a program until its steps are steady
        self.copies = 9  # how many copies of the program fit into memory at once
        self.observed: Trial | None = None
        self.first_plain: TrialRecord | None = None
        self.perturbed: dict[
            float, list[TrialRecord]
        ] = {}  # plain runs, by the perturbation of their weights
        self.must_fit = False  # the plain program exceeds the limit, so a slower plan that fits is adopted
        self.disturbance = Disturbance(self.facts.cores)
        self.space = Space((), frozenset(), {}, frozenset())
        self.choices: dict[str, Choice] = {}  # by factor key
        self.blocks: list[TimedBlock] = []
        self.fitted: Fitted | None = None
        self.processes = 0
        self.length_ticks: int | None = None  # of the program, once it was observed to finish
        self.late: dict[str, None] = {}  # the stages that ran when the budget ended, and after
        self.warm_ticks = 0  # ticks until the steps are steady
        self.once_s = 0.0  # time to fetch a whole data set first; later programs of the search reuse it
        self.furthest_plain = 0  # the last tick that the plain program reached

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def spent_s(self) -> float:
        return seconds() - self.start_s

    @property
    def end_s(self) -> float:
        return self.start_s + self.budget_s

    def settle_budget(self) -> None:
        """Choose the budget after the program was observed, unless you gave one."""
        if self.goal.budget_s is None:
            prior = priors(self.facts, self.session.context, {})
            self.budget_s = self.session.budget_s = default_budget_s(
                self.start_cost_s,
                self.interleaver.tick_ms,
                bool(self.goal.named) or self.goal.memory_limit_bytes is not None or self.alone is not None,
                self.goal.horizon_s * gain_of_compilers(self.candidates.values(), prior),
            )
        self.watcher.until(self.end_s)

    def starts_s(self, programs: int) -> float:
        """Seconds to start this many programs together: their imports overlap, their warm-ups do not."""
        warm_s = self._warm_s
        return (
            self.start_cost_s
            if programs == 1
            else TWO_STARTS * (self.start_cost_s - warm_s) + programs * warm_s
        )

    def start_of(self, until_ready_s: float, programs: int) -> float:
        """Seconds per start, from the time at which the last of ``programs`` programs was ready."""
        warm_s = self._warm_s
        return (
            until_ready_s
            if programs == 1
            else max(0.0, until_ready_s - programs * warm_s) / TWO_STARTS + warm_s
        )

    @property
    def _warm_s(self) -> float:
        """The part of a start that the program spends training."""
        return min(self.start_cost_s, (self.warm_ticks + 1) * self.interleaver.tick_ms / 1000)

    @property
    def rounds(self) -> int:
        """Rounds of one confirming pair.

        A slow start justifies longer measuring, as far as the budget allows.
        """
        starts_s = self.starts_s(2)
        fair_s = max(PAIR_S, min(starts_s, CONFIRM_SHARE * self.budget_s / PAIRS - starts_s) / 2)
        return max(2, min(ROUNDS_OF_A_PAIR, int(fair_s / max(self.interleaver.block_s, 0.1))))

    @property
    def pair_s(self) -> float:
        """Seconds for one confirming pair: two programs that start together, and their blocks."""
        return self.starts_s(2) + 2.1 * self.rounds * self.interleaver.block_s + 1

    @property
    def replica_s(self) -> float:
        """Seconds to replay a step: capture some steps, replay them, train the network on one of them."""
        step_s = self.interleaver.tick_ms / 1000
        slow = self.interleaver.tick_ms > SLOW_MS
        batch = max(
            (loader["batch_size"] or 0 for loader in self.session.context.get("loaders", ())), default=0
        )
        share = samples_played(batch, self.interleaver.tick_ms) / batch if batch else 1.0
        return (
            (STEPS_OF_A_LARGE_MODEL if slow else STEPS) * step_s
            + PLAYS * step_s * share
            + (0.0 if slow else SHARPENING_S)
        )

    @property
    def fit_until_s(self) -> float:
        """The time by which everything except confirming must be done."""
        pairs = PAIRS if PAIRS * self.pair_s <= THREE_PAIRS_SHARE * self.budget_s else FEWEST_PAIRS
        return self.end_s - min(pairs * self.pair_s + self.replica_s, CONFIRM_SHARE * self.budget_s)

    @property
    def first_wave_until_s(self) -> float:
        """The deadline of the first wave.

        It may use the time of a third pair and part of the overrun: without a wave there is nothing to
        confirm.
        """
        return max(
            self.explore_until_s,
            self.end_s + 0.5 * OVERRUN * self.budget_s - FEWEST_PAIRS * self.pair_s - self.replica_s,
        )

    @property
    def explore_until_s(self) -> float:
        return self.fit_until_s - (
            FIT_SHARE * self.budget_s if self.goal.memory_limit_bytes is not None else 0.0
        )

    @property
    def timeout_s(self) -> float:
        """The timeout for a program to become ready."""
        return 120 + 4 * self.start_cost_s

    def allowed_s(self, overrun: bool = False) -> float:
        """Seconds left in the budget; ``overrun`` adds a little to finish running measurements."""
        return self.end_s - seconds() + (OVERRUN * self.budget_s if overrun else 0.0)

    def stage(self, name: str, detail: str) -> None:
        self.watcher.stage(name, detail)
        self.late = {**(self.late if seconds() > self.end_s else {}), name: None}

    def say_why_late(self) -> None:
        """Say what was running when the budget ended, if that took long."""
        if self.allowed_s(overrun=True) < 0:
            busy = " (other programs keep the machine busy)" if self.disturbance.disturbed else ""
            self.session.overrun = f"not done by then: {', '.join(self.late)}{busy}"

    def enough_m(self, more_s: float) -> int:
        """Whole minutes of a budget that would leave ``more_s`` more seconds."""
        return math.ceil((self.spent_s + more_s) / 60)

    # -- programs and records ---------------------------------------------------------------------------------------

    def enter(
        self, plan: Plan, seed: int = 0, timeout_s: float | None = None, perturbation: float = 0.0
    ) -> RunningCandidate:
        """Start a program under a plan; it is ready and paused on return.

        Raises ProgramGone, or LeverFailed if a lever could not be applied.
        """
        running_candidate = self.interleaver.enter(plan, seed, timeout_s or self.timeout_s, perturbation)
        for left in running_candidate.trial.ready.get("skipped", ()):
            self.interleaver.dismiss(running_candidate.trial)
            raise LeverFailed(left["name"], left["reason"])
        return running_candidate

    def order(
        self, asked: Sequence[ProgramRequest], for_s: float, share: float | None = None
    ) -> dict[str, Any]:
        """Return an order for another machine to measure programs together (`tune/remote.py`).

        ``for_s``: time limit, including the starts. ``share``: measuring may end after this share of the time
        of the starts.
        """
        interleaver = self.interleaver
        return {
            "kind": "together",
            "typed": list(self.command.typed),
            "tick_ms": interleaver.tick_ms,
            "unit": interleaver.unit,
            "prefetched_ticks": interleaver.prefetched_ticks,
            "longest_ticks": interleaver.longest_ticks,
            "timeout_s": self.timeout_s,
            "seconds": for_s,
            "share": share,
            "asked": [one.to_json() for one in asked],
        }

    def plain_again(self) -> Trial | None:
        """Return the observed plain program, or a new one if it has ended; None if time is too short."""
        if self.observed is not None and self.observed in self.interleaver.running:
            return self.observed
        if self.allowed_s(overrun=True) < self.start_cost_s:
            return None
        try:
            self.observed = self.enter(Plan()).trial
        except (ProgramGone, LeverFailed):
            self.observed = None
        return self.observed

    def plan_for(self, on: Iterable[str]) -> Plan:
        """Return the plan with these factors on."""
        return in_order(self.choices[key] for key in on)

    def live_rows(self, rows: Iterable[Iterable[str]]) -> tuple[Row, ...]:
        """Return the choices of each block, from the keys of its active levers."""
        return tuple(self.plan_for(row).choices for row in rows)

    def keep_blocks(
        self, process: int, on: Sequence[frozenset[str]], seen: ProgramResult, seed: int, host: str = ""
    ) -> None:
        """Add the blocks of one process to the measurements; ``on`` lists the active factors of each row.

        Blocks with a factor or a pair that has left the search meanwhile are not kept: another program of the
        same wave may have shown that it does not apply.
        """
        self.once_s = max(self.once_s, seen.ready.get("once_s", 0.0))
        for block in seen.blocks:
            if not self._searched(on[block.row]):
                continue
            window = seed * WINDOWS_A_SEED + block.tick // self.interleaver.window_ticks
            self.blocks.append(
                TimedBlock(process, on[block.row], block.at_s - self.start_s, window, block.ms, host)
            )
        self.session.blocks = [{**vars(b), "on": sorted(b.on), "at_s": round(b.at_s, 2)} for b in self.blocks]

    def _searched(self, on: frozenset[str]) -> bool:
        return on <= self.space.index.keys() and self.space.allowed(on)

    def keep_first_plain(self, record: TrialRecord) -> None:
        """Keep the first losses and weights of the observed program, to test repeatability.

        The program had seed 0 and ran without levers until the search switched some on.
        """
        self.session.nan_loss = self.session.nan_loss or nan_loss(record)
        if self.first_plain is None:
            record.losses = record.losses[: record.warmup_steps]
            record.weights_digests = {
                step: digest
                for step, digest in record.weights_digests.items()
                if int(step) <= record.warmup_steps
            }
            self.first_plain = record

    def keep_observed(self) -> None:
        """End the observed program and keep its first losses."""
        plain, self.observed = self.observed, None
        if plain is not None and plain in self.interleaver.running:
            self.furthest_plain = max(self.furthest_plain, plain.ticks_done)
            self.keep_first_plain(plain.finish())
            self.interleaver.dismiss(plain)

    def blocks_of(self, space: Space) -> list[TimedBlock]:
        """Return the blocks whose active factors are all in ``space``."""
        return [block for block in self.blocks if block.on <= space.index.keys()]

    def fit_of(self, space: Space) -> Fitted:
        return fit(space, self.blocks_of(space))

    @property
    def measured(self) -> frozenset[str]:
        return frozenset().union(*(block.on for block in self.blocks))

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the measured processes."""
        return frozenset(block.process for block in self.blocks)

    def gain(self, on: frozenset[str]) -> Ratio:
        """Return the speed relative to the plain program, from all blocks; ``n`` counts processes."""
        return ratio_of((self.fitted or self.refit()).gain(on), len(self.numbers))

    def effect(self, key: str, beside: frozenset[str]) -> Ratio:
        """Return the speed-up of one factor given the others; ``n`` counts the blocks in which it was on."""
        return ratio_of(
            (self.fitted or self.refit()).effect(key, beside), sum(key in block.on for block in self.blocks)
        )

    def drop(self, key: str) -> None:
        """Remove a factor from the search; blocks with it on no longer count."""
        self.space = only(self.space, self.choices.keys() - {key})
        self.choices.pop(key, None)
        self._narrowed()

    def forbid(self, one: str, other: str) -> None:
        """Record that two levers do not work together."""
        self.space = replace(self.space, excludes=self.space.excludes | {frozenset((one, other))})
        self._narrowed()

    def _narrowed(self) -> None:
        """Drop what was measured and computed with factors that are no longer searched."""
        self.blocks = [block for block in self.blocks if self._searched(block.on)]
        self.fitted = None

    def refit(self) -> Fitted:
        self.fitted = fit(self.space, self.blocks)
        return self.fitted

    def note(
        self,
        plan: str,
        how: str,
        ratio: Ratio | None,
        note: str,
        start_s: float,
        against: str = "plain",
        host: str = "",
    ) -> None:
        found: tuple[float | None, float | None, float | None, int] = (None, None, None, 0)
        if ratio is not None:
            found = ratio.median, ratio.low, ratio.high, ratio.n
        took_s = round(seconds() - start_s, 1)
        self.watcher.comparison(plan, ratio, note)
        self.session.comparisons.append(ComparisonRecord(plan, against, how, *found, note, took_s, host))
        self.save()

    def save(self) -> None:
        self.session.spent_s = round(self.spent_s, 1)
        self.session.levers = [candidate.record() for candidate in self.candidates.values()]
        self.save_session(self.session)
