"""The state of one search, passed from stage to stage: the clock, the candidates, the measured blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.guard.batch_slices import STEPS_PER_REPLICA, replica_samples
from flatout.guard.loss_curves import nonfinite_loss
from flatout.guard.replica import CAPTURED_STEPS, LARGE_MODEL_STEPS, OVERFIT_S, SLOW_STEP_MS
from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.disturbance import Disturbance
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio, TrialRecord
from flatout.schema.session import ComparisonRecord, SessionRecord
from flatout.trial.blocks import LeverFailed, Watcher
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.budget import USUAL_BUDGET_S, compiler_gain, default_budget_s
from flatout.tune.candidates import Candidate, ordered_plan
from flatout.tune.comparison import LiveLevers, ProgramRequest, ProgramResult
from flatout.tune.effects import Fitted, Space, TimedBlock, fit_effects, ratio_of
from flatout.tune.goal import Goal, restricted
from flatout.tune.interleaver import Interleaver, RunningCandidate
from flatout.tune.limits import (
    CONFIRM_SHARE,
    JOINT_START_FACTOR,
    MAX_PAIR_ROUNDS,
    MEMORY_FIT_SHARE,
    MIN_PAIRS,
    OVERRUN_SHARE,
    PAIR_SIDE_S,
    SEED_WINDOW_STRIDE,
    THREE_PAIRS_SHARE,
    USUAL_PAIRS,
)
from flatout.tune.prior import priors
from flatout.tune.remote import TIMER_FIELDS, RemoteNodes


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
    single_command: Command | None = None  # starts one process when ``command`` starts several
    min_ticks: int = 0  # of both programs of a confirming pair
    remote: RemoteNodes | None = None  # remote machines that run independent comparisons at the same time

    def __post_init__(self) -> None:
        self.start_s, self.budget_s = seconds() - self.session.spent_s, self.goal.budget_s or USUAL_BUDGET_S
        self.interleaver = Interleaver(self.command, self.job, self.facts, self.base, self.single_command)
        self.candidates: dict[str, Candidate] = {}
        self.start_cost_s = 5.0  # from the start of a program until its steps are steady
        self.max_copies = 9  # how many copies of the program fit into memory at once
        self.plain_trial: Trial | None = None
        self.first_record: TrialRecord | None = None
        # Plain runs, by the perturbation of their weights
        self.perturbed_runs: dict[float, list[TrialRecord]] = {}
        self.must_fit = False  # the plain program exceeds the limit, so a slower plan that fits is adopted
        self.disturbance = Disturbance(self.facts.cores)
        self.space = Space((), frozenset(), {}, frozenset())
        self.choices: dict[str, Choice] = {}  # by factor key
        self.blocks: list[TimedBlock] = []
        self.fitted: Fitted | None = None
        self.processes = 0
        self.length_ticks: int | None = None  # of the program, once it was observed to finish
        self.overdue_stages: dict[str, None] = {}  # the stages that ran when the budget ended, and after
        self.warmup_ticks = 0  # ticks until the steps are steady
        self.dataset_fetch_s = 0.0  # to fetch a whole data set first; later programs of the search reuse it
        self.max_plain_tick = 0  # the last tick that the plain program reached

    # -- time

    @property
    def spent_s(self) -> float:
        return seconds() - self.start_s

    @property
    def end_s(self) -> float:
        return self.start_s + self.budget_s

    def choose_budget(self) -> None:
        """Choose the budget after the program was observed, unless you gave one."""
        if self.goal.budget_s is None:
            prior = priors(self.facts, self.session.context, {})
            data_ms = self.plain_trial.ready["data_ms"] if self.plain_trial else 0.0
            computing = max(0.0, 1 - data_ms / self.interleaver.tick_ms)
            self.budget_s = self.session.budget_s = default_budget_s(
                self.start_cost_s,
                self.interleaver.tick_ms,
                bool(self.goal.named)
                or self.goal.memory_limit_bytes is not None
                or self.single_command is not None,
                self.goal.horizon_s * computing * compiler_gain(self.candidates.values(), prior),
            )
        self.watcher.set_end(self.end_s)

    def joint_start_s(self, programs: int) -> float:
        """Seconds to start this many programs together: their imports overlap, their warm-ups do not."""
        warmup_s = self._warmup_s
        return (
            self.start_cost_s
            if programs == 1
            else JOINT_START_FACTOR * (self.start_cost_s - warmup_s) + programs * warmup_s
        )

    def single_start_s(self, until_ready_s: float, programs: int) -> float:
        """The reverse of ``joint_start_s``, from the time until the last program was ready."""
        warmup_s = self._warmup_s
        return (
            until_ready_s
            if programs == 1
            else max(0.0, until_ready_s - programs * warmup_s) / JOINT_START_FACTOR + warmup_s
        )

    @property
    def _warmup_s(self) -> float:
        return min(self.start_cost_s, (self.warmup_ticks + 1) * self.interleaver.tick_ms / 1000)

    @property
    def rounds(self) -> int:
        """Rounds of one confirming pair.

        A slow start justifies longer measuring, as far as the budget allows.
        """
        joint_start_s = self.joint_start_s(2)
        measuring_s = max(
            PAIR_SIDE_S, min(joint_start_s, CONFIRM_SHARE * self.budget_s / USUAL_PAIRS - joint_start_s) / 2
        )
        return max(2, min(MAX_PAIR_ROUNDS, int(measuring_s / max(self.interleaver.block_s, 0.1))))

    @property
    def pair_s(self) -> float:
        """Seconds for one confirming pair: two programs that start together, and their blocks."""
        return self.joint_start_s(2) + 2.1 * self.rounds * self.interleaver.block_s + 1

    @property
    def replica_s(self) -> float:
        """Seconds to replay a step: capture some steps, replay them, train the network on one of them."""
        step_s = self.interleaver.tick_ms / 1000
        slow = self.interleaver.tick_ms > SLOW_STEP_MS
        batch = max(
            (loader["batch_size"] or 0 for loader in self.session.context.get("loaders", ())), default=0
        )
        share = replica_samples(batch, self.interleaver.tick_ms) / batch if batch else 1.0
        return (
            (LARGE_MODEL_STEPS if slow else CAPTURED_STEPS) * step_s
            + STEPS_PER_REPLICA * step_s * share
            + (0.0 if slow else OVERFIT_S)
        )

    @property
    def memory_fit_until_s(self) -> float:
        """The time by which everything except confirming must be done."""
        pairs = USUAL_PAIRS if USUAL_PAIRS * self.pair_s <= THREE_PAIRS_SHARE * self.budget_s else MIN_PAIRS
        return self.end_s - min(pairs * self.pair_s + self.replica_s, CONFIRM_SHARE * self.budget_s)

    @property
    def first_wave_until_s(self) -> float:
        """The deadline of the first wave, the programs that start together first.

        It may use the time of a third pair and part of the overrun: without a wave there is nothing to
        confirm.
        """
        return max(
            self.explore_until_s,
            self.end_s + 0.5 * OVERRUN_SHARE * self.budget_s - MIN_PAIRS * self.pair_s - self.replica_s,
        )

    @property
    def explore_until_s(self) -> float:
        return self.memory_fit_until_s - (
            MEMORY_FIT_SHARE * self.budget_s if self.goal.memory_limit_bytes is not None else 0.0
        )

    @property
    def timeout_s(self) -> float:
        """For a program to become ready."""
        return 120 + 4 * self.start_cost_s

    def remaining_s(self, overrun: bool = False) -> float:
        """Seconds left in the budget; ``overrun`` adds a little to finish running measurements."""
        return self.end_s - seconds() + (OVERRUN_SHARE * self.budget_s if overrun else 0.0)

    def stage(self, name: str, detail: str) -> None:
        self.watcher.stage(name, detail)
        self.overdue_stages = {**(self.overdue_stages if seconds() > self.end_s else {}), name: None}

    def explain_overrun(self) -> None:
        """Say what was running when the budget ended, if that took long."""
        if self.remaining_s(overrun=True) < 0:
            busy = " (other programs keep the machine busy)" if self.disturbance.disturbed else ""
            self.session.overrun = f"not done by then: {', '.join(self.overdue_stages)}{busy}"

    def budget_hint(self, extra_s: float) -> str:
        """Name a budget that would leave ``extra_s`` more seconds."""
        return f"give --budget {math.ceil((self.spent_s + extra_s) / 60)}m"

    # -- programs and records

    def start_paused(
        self, plan: Plan, seed: int = 0, timeout_s: float | None = None, perturbation: float = 0.0
    ) -> RunningCandidate:
        """Start a program under a plan; it is ready and paused on return.

        Raises ProgramGone, or LeverFailed if a lever could not be applied.
        """
        started = self.interleaver.start_paused(plan, seed, timeout_s or self.timeout_s, perturbation)
        for skipped in started.trial.ready.get("skipped", ()):
            self.interleaver.dismiss(started.trial)
            raise LeverFailed(skipped["name"], skipped["reason"])
        return started

    def remote_order(
        self, requests: Sequence[ProgramRequest], limit_s: float, max_startup_ratio: float | None = None
    ) -> dict[str, Any]:
        """An order for another machine to measure programs together (`tune/remote.py`).

        ``limit_s``: time limit, including the starts. ``max_startup_ratio``: as for `measure_together`.
        """
        return {
            "kind": "measure",
            "typed": list(self.command.typed),
            "timer": {name: getattr(self.interleaver, name) for name in TIMER_FIELDS},
            "timeout_s": self.timeout_s,
            "seconds": limit_s,
            "max_startup_ratio": max_startup_ratio,
            "requests": [request.to_json() for request in requests],
        }

    def ensure_plain_trial(self) -> Trial | None:
        """The observed plain program, or a new one if it has ended; None if time is too short."""
        if self.plain_trial is not None and self.plain_trial in self.interleaver.running:
            return self.plain_trial
        if self.remaining_s(overrun=True) < self.start_cost_s:
            return None
        try:
            self.plain_trial = self.start_paused(Plan()).trial
        except (ProgramGone, LeverFailed):
            self.plain_trial = None
        return self.plain_trial

    def plan_for(self, active: Iterable[str]) -> Plan:
        """The plan with these factors on."""
        return ordered_plan(self.choices[key] for key in active)

    def live_levers(self, factor_sets: Iterable[Iterable[str]]) -> tuple[LiveLevers, ...]:
        return tuple(self.plan_for(keys).choices for keys in factor_sets)

    def add_blocks(
        self, process: int, active: Sequence[frozenset[str]], result: ProgramResult, seed: int, host: str = ""
    ) -> list[TimedBlock]:
        """Add the blocks of one process to the measurements; ``active`` lists the active factors of each row.

        Blocks with a factor or a pair that has left the search meanwhile are returned, but not kept.
        """
        self.disturbance.add(block.busy for block in result.blocks)
        self.dataset_fetch_s = max(self.dataset_fetch_s, result.ready.get("dataset_fetch_s", 0.0))
        window_ticks, first_window = self.interleaver.window_ticks, seed * SEED_WINDOW_STRIDE
        blocks = [
            TimedBlock(
                process,
                active[block.row],
                block.at_s - self.start_s,
                first_window + block.tick // window_ticks,
                block.ms,
                host,
                block.busy,
            )
            for block in result.blocks
        ]
        self.blocks += [block for block in blocks if self._is_allowed(block.active)]
        self.fitted = None
        self.session.blocks = [
            {**vars(b), "active": sorted(b.active), "at_s": round(b.at_s, 2)} for b in self.blocks
        ]
        return blocks

    def _is_allowed(self, active: frozenset[str]) -> bool:
        return active <= self.space.index.keys() and self.space.allowed(active)

    def keep_first_plain(self, record: TrialRecord) -> None:
        """Keep the first losses and weights of the observed program, to test repeatability."""
        self.session.nan_loss = self.session.nan_loss or nonfinite_loss(record)
        if self.first_record is None:
            record.losses = record.losses[: record.warmup_steps]
            record.weights_digests = {
                step: digest
                for step, digest in record.weights_digests.items()
                if int(step) <= record.warmup_steps
            }
            self.first_record = record

    def finish_plain_trial(self) -> None:
        """End the observed program and keep its first losses."""
        plain, self.plain_trial = self.plain_trial, None
        if plain is not None and plain in self.interleaver.running:
            self.max_plain_tick = max(self.max_plain_tick, plain.ticks_done)
            self.keep_first_plain(plain.finish())
            self.interleaver.dismiss(plain)

    @property
    def beside(self) -> str:
        return " beside other programs" if self.disturbance.disturbed else ""

    def counted(self, blocks: Iterable[TimedBlock]) -> list[TimedBlock]:
        """The blocks that count: those beside other processes only if most are."""
        limit = math.inf if self.disturbance.disturbed else self.disturbance.limit
        return [block for block in blocks if block.busy < limit]

    @property
    def counted_blocks(self) -> list[TimedBlock]:
        return self.counted(self.blocks)

    def blocks_of(self, space: Space) -> list[TimedBlock]:
        return [block for block in self.counted_blocks if block.active <= space.index.keys()]

    def fit_effects(self, space: Space) -> Fitted:
        return fit_effects(space, self.blocks_of(space))

    @property
    def measured_keys(self) -> frozenset[str]:
        return frozenset().union(*(block.active for block in self.counted_blocks))

    @property
    def process_numbers(self) -> frozenset[int]:
        """The numbers of the measured processes."""
        return frozenset(block.process for block in self.counted_blocks)

    def gain(self, active: frozenset[str]) -> Ratio:
        """The speed relative to the plain program, from all blocks; ``n`` counts processes."""
        return ratio_of((self.fitted or self.refit()).gain(active), len(self.process_numbers))

    def effect(self, key: str, others: frozenset[str]) -> Ratio:
        """The speed-up of one factor given the others; ``n`` counts the blocks in which it was on."""
        n = sum(key in block.active for block in self.counted_blocks)
        return ratio_of((self.fitted or self.refit()).effect(key, others), n)

    def drop_factor(self, key: str) -> None:
        """Remove a factor from the search; blocks with it on no longer count."""
        self.space = restricted(self.space, self.choices.keys() - {key})
        self.choices.pop(key, None)
        self._discard_excluded()

    def exclude_pair(self, one: str, other: str) -> None:
        """Record that two levers do not work together."""
        self.space = replace(self.space, excludes=self.space.excludes | {frozenset((one, other))})
        self._discard_excluded()

    def _discard_excluded(self) -> None:
        self.blocks = [block for block in self.blocks if self._is_allowed(block.active)]
        self.fitted = None

    def drop_cold_blocks(self) -> None:
        """Drop the blocks that took over twice as long as a later one of their process: it was not steady yet."""
        fastest: dict[int, float] = {}
        kept = []
        for block in sorted(self.blocks, key=lambda block: -block.at_s):
            fastest[block.process] = min(block.ms, fastest.get(block.process, math.inf))
            kept += [block] if block.ms <= 2 * fastest[block.process] else []
        self.blocks, self.fitted = kept[::-1], None

    def refit(self) -> Fitted:
        self.fitted = fit_effects(self.space, self.counted_blocks)
        return self.fitted

    def record_comparison(
        self,
        plan: str,
        how: str,
        ratio: Ratio | None,
        note: str,
        start_s: float,
        against: str = "plain",
        host: str = "",
    ) -> None:
        figures: tuple[float | None, float | None, float | None, int] = (None, None, None, 0)
        if ratio is not None:
            figures = ratio.median, ratio.low, ratio.high, ratio.n
        took_s = round(seconds() - start_s, 1)
        self.watcher.comparison(plan, ratio, note)
        self.session.comparisons.append(ComparisonRecord(plan, against, how, *figures, note, took_s, host))
        self.save()

    def save(self) -> None:
        self.session.spent_s = round(self.spent_s, 1)
        self.session.levers = [candidate.record() for candidate in self.candidates.values()]
        self.save_session(self.session)
