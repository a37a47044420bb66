"""The state of one search, passed from stage to stage: the clock, the candidates, the records."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.plan.errors import FlatoutError, NothingMeasured, ProgramFailed
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.plan import Choice, Plan
from flatout.plan.records import Contest, Ratio, SessionRecord, TrialRecord
from flatout.plan.words import Effect
from flatout.trial.blocks import LeverFailed, Watcher
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.arena import Arena, Entrant
from flatout.tune.candidates import Candidate
from flatout.tune.elsewhere import Elsewhere

PAIRS = 3
ROUNDS_OF_A_PAIR = 6
PAIR_S = 6.0  # each side of a pair is measured so long, or for six rounds
CONFIRM_SHARE = 0.6  # of the budget at most is kept back for confirming
LONGEST_LIVE_S = 12.0  # of one live contest
COMPILE_S = 75.0  # what a first compilation is given
OVERRUN = 0.15  # of the budget, to finish the third pair
FIT_SHARE = 0.35  # of the budget, where memory is limited: for the frontier
REPLICA_TICKS = 10  # what the guard's replica of a step costs: four steps, one of them in double precision


@dataclass(frozen=True)
class Goal:
    """What was asked for. ``horizon_s`` is how long the real job will run: a warm-up must be repaid within it.

    ``first`` are the levers to begin with, the most promising first: what a profile of the program has found. ``memory_limit_bytes`` is what the
    tensors of a step may take; the fastest plan that fits is wanted then. ``named`` are tried beside the search, and never taken.
    """

    budget_s: float
    effects: frozenset[Effect] = frozenset({Effect.EXACT, Effect.ROUNDING, Effect.RESAMPLED})
    only: frozenset[str] | None = None
    horizon_s: float = 3600.0
    first: tuple[str, ...] = ()
    memory_limit_bytes: int | None = None
    named: tuple[Choice, ...] = ()


@dataclass
class Tuning:
    command: Command
    job: JobFolder
    facts: Facts
    session: SessionRecord
    goal: Goal
    watcher: Watcher = field(default_factory=Watcher)
    save_session: Callable[[SessionRecord], None] = lambda session: None
    base: Plan | None = None  # what every program of the search runs under: how it is divided over ranks
    alone: Command | None = None  # the program as one process, where ``command`` starts it as several
    elsewhere: Elsewhere | None = None  # other machines, which hold what is independent of each other at once

    def __post_init__(self) -> None:
        self.start_s = seconds() - self.session.spent_s
        self.arena = Arena(self.command, self.job, self.facts, self.base, self.alone)
        self.candidates: dict[str, Candidate] = {}
        self.floor = 0.01  # a gain below this is not told from none
        self.start_cost_s = 5.0  # of one program, until its steps are steady
        self.longest_pair_s = 0.0
        self.copies = 9  # of the program that fit into memory at once
        self.observed: Trial | None = None
        self.first_plain: TrialRecord | None = None
        self.shaken: list[TrialRecord] = []
        self.must_fit = False  # the plain program does not fit into the limit: a plan that does is taken even where it is slower

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def spent_s(self) -> float:
        return seconds() - self.start_s

    @property
    def end_s(self) -> float:
        return self.start_s + self.goal.budget_s

    @property
    def rounds(self) -> int:
        """Rounds of one confirming pair: where starting it takes long, measuring may take as long, as far as the budget allows."""
        starts_s = 2 * self.start_cost_s
        fair_s = max(PAIR_S, min(starts_s, CONFIRM_SHARE * self.goal.budget_s / PAIRS - starts_s) / 2)
        return max(2, min(ROUNDS_OF_A_PAIR, int(fair_s / max(self.arena.block_s, 0.1))))

    @property
    def pair_s(self) -> float:
        """What one confirming pair costs, two starts and its blocks: the estimate, or the longest so far."""
        return self.longest_pair_s or 2 * (self.start_cost_s + self.rounds * self.arena.block_s) * 1.05 + 1

    @property
    def replica_s(self) -> float:
        """What it costs to do one step again in float64."""
        return REPLICA_TICKS * self.arena.tick_ms / 1000

    @property
    def fit_until_s(self) -> float:
        """When everything but confirming must be done."""
        return self.end_s - min(PAIRS * self.pair_s + self.replica_s, CONFIRM_SHARE * self.goal.budget_s)

    @property
    def explore_until_s(self) -> float:
        return self.fit_until_s - (FIT_SHARE * self.goal.budget_s if self.goal.memory_limit_bytes is not None else 0.0)

    def allowed_s(self, overrun: bool = False) -> float:
        """What is left of the budget; with ``overrun`` a little more, so that what was begun can be finished."""
        return self.end_s - seconds() + (OVERRUN * self.goal.budget_s if overrun else 0.0)

    def enough_m(self, more_s: float) -> int:
        """Whole minutes of a budget that would have been enough for so much more."""
        return math.ceil((self.spent_s + more_s) / 60)

    # -- programs and records ---------------------------------------------------------------------------------------

    def enter(self, plan: Plan, seed: int = 0, patience_s: float | None = None, shake: float = 0.0) -> Entrant:
        """A program under a plan, ready and held. Raises ProgramGone, or LeverFailed where a lever could not be applied."""
        entrant = self.arena.enter(plan, seed, patience_s or 120 + 4 * self.start_cost_s, shake)
        for left in entrant.trial.ready.get("skipped", ()):
            self.arena.dismiss(entrant.trial)
            raise LeverFailed(left["name"], left["reason"])
        return entrant

    def note(self, plan: str, how: str, ratio: Ratio | None, note: str, start_s: float, against: str = "plain", host: str = "") -> None:
        self.watcher.contest(plan, ratio, note)
        contest = Contest(plan, against, how, None, None, None, 0, note, round(seconds() - start_s, 1), host)
        if ratio is not None:
            contest.ratio, contest.low, contest.high, contest.n = ratio.median, ratio.low, ratio.high, ratio.n
        self.session.contests.append(contest)
        self.save()

    def save(self) -> None:
        self.session.spent_s = round(self.spent_s, 1)
        self.session.levers = [candidate.record() for candidate in self.candidates.values()]
        self.save_session(self.session)


def why_gone(error: ProgramGone | LeverFailed) -> str:
    """The last line of what a program or a lever said as it failed."""
    text = error.record.reason if isinstance(error, ProgramGone) else error.reason
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:240] if lines else "it ended without a word"


def why_not(record: TrialRecord, what: str, shorter: str) -> FlatoutError:
    """The error for a program that was gone before ``what``; ``shorter`` is what a person may do beside letting it train longer."""
    if record.status == "failed":
        said = record.log_tail.strip() or record.reason
        return ProgramFailed(f"the program fails by itself (exit code {record.exit_code}):\n\n{said}", record.exit_code or 1)
    if record.status == "ended":
        return NothingMeasured(f"{what}: the program ended first. Let it train longer, or {shorter}.")
    return NothingMeasured(f"{what}: {record.reason.strip().splitlines()[-1] if record.reason.strip() else record.status}.")
