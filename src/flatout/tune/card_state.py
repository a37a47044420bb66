"""What a search on a GPU knows, and the actions that it can take (`flatout.tune.card_policy` chooses)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from flatout.measure.statistics import median
from flatout.trial.blocks import BLOCK_MS
from flatout.tune.comparison import LOAD_SAMPLE_S
from flatout.tune.effects import TimedBlock
from flatout.tune.space import Space

PAIR_S, MIN_ROUNDS, MAX_ROUNDS = 2.5, 2, 6  # of the blocks of each side of a pair
RESERVE = 1.15  # factor on the expected cost of what must fit into the rest of the budget

Keys = frozenset[str]
PLAIN: Keys = frozenset()
NEXT: Keys = frozenset({"the next plan"})  # it is not known yet


class Stage(Enum):
    IMPORTING = "importing"
    HELD = "held"  # before it touches the device
    WARMING = "warming up"
    READY = "ready"
    ENDED = "ended"  # its blocks and its record stay


@dataclass(frozen=True)
class Program:
    """A process of the program. ``plan``: until WARMING, only the keys with which it started."""

    number: int
    seed: int
    stage: Stage
    plan: Keys = PLAIN

    @property
    def uses_device(self) -> bool:
        return self.stage in (Stage.WARMING, Stage.READY)

    @property
    def has_plan(self) -> bool:
        """Whether it got its plan; it may have ended."""
        return self.uses_device or self.stage is Stage.ENDED


class Outcome(Enum):
    """What a confirmation came to."""

    KEPT = "kept"
    REJECTED = "rejected"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Costs:
    """Expected seconds. ``warm_s``: from its hold until a program trains; then ``warm_steps`` steps until it is ready.

    ``step_s``: of the plain program. ``slow_s``: more for the first process with a slow lever.
    """

    import_s: float
    warm_s: float
    warm_steps: int
    step_s: float
    replica_s: float
    slow_s: float
    end_s: float = 0.5

    def ready_s(self, step_s: float) -> float:
        return self.warm_s + self.warm_steps * step_s


def block_s(step_s: float) -> float:
    """Seconds of one block: its steps, one step before it, and the samples of the machine's load."""
    return 2 * LOAD_SAMPLE_S + max(BLOCK_MS / 1000, step_s) + step_s


@dataclass(frozen=True)
class State:
    """What a search knows. ``overrun_s``: to finish what has begun. ``bundle``: the first plan.

    ``copies``: programs that the device's memory holds; ``room``: further processes that the host's memory holds.
    ``process``: keys that act before a program starts; ``live``: keys that can be switched. ``slow``: keys that start
    slowly, the most promising first. ``inexact``: live keys that the guard replays; ``checked``: sets of them that
    passed, ``wrong``: keys that did not. ``replaced_by_slow``: live keys that save what a slow lever saves, too.
    ``equal``: whether the bits of a process with these exact keys were the plain program's. ``outcomes`` is in order.
    """

    now_s: float
    end_s: float
    overrun_s: float
    cores: int
    copies: int
    room: int
    costs: Costs
    space: Space
    bundle: Keys
    process: Keys
    live: Keys
    inexact: Keys
    slow: tuple[str, ...] = ()
    replaced_by_slow: Keys = PLAIN
    programs: tuple[Program, ...] = ()
    blocks: tuple[TimedBlock, ...] = ()
    checked: frozenset[Keys] = frozenset()
    wrong: Keys = PLAIN
    equal: Mapping[Keys, bool] = field(default_factory=dict)
    outcomes: Mapping[Keys, Outcome] = field(default_factory=dict)

    @property
    def kept(self) -> Keys:
        """The last confirmed plan; PLAIN without one."""
        kept = [plan for plan, outcome in self.outcomes.items() if outcome is Outcome.KEPT]
        return kept[-1] if kept else PLAIN

    @property
    def tried_slow(self) -> Keys:
        return frozenset(self.slow) & frozenset().union(*(block.active for block in self.blocks))

    def at(self, seed: int, plan: Keys) -> Program | None:
        """The process with this seed and plan; it may have ended."""
        return next((p for p in self.programs if p.has_plan and (p.seed, p.plan) == (seed, plan)), None)

    @property
    def base(self) -> Keys:
        """The plan to improve."""
        return self.kept or self.first

    @property
    def first(self) -> Keys:
        """The first plan; if it is slower than the plain program, its live levers alone. PLAIN if these are, too."""
        whole = self.sound(self.bundle - self.wrong)
        plans = whole, whole & (self.live | self.process)
        return next((plan for plan in plans if plan and not self.is_slower(plan)), PLAIN)

    def is_slower(self, plan: Keys) -> bool:
        """Whether its first pair says that the plan is slower than the plain program."""
        plain, planned = self.at(0, PLAIN), self.at(0, plan)
        if plain is None or planned is None:
            return False
        ours = self.blocks_of(planned)
        return len(ours) >= self.rounds and median(ours) > median(self.blocks_of(plain))

    @property
    def rounds(self) -> int:
        """Blocks of each side of a pair."""
        return max(MIN_ROUNDS, min(MAX_ROUNDS, round(PAIR_S / block_s(self.costs.step_s))))

    def step_s(self, plan: Keys) -> float:
        """Seconds of a step under this plan, as far as they are known: those of the base, or half of a plain step."""
        if not plan:
            return self.costs.step_s
        times = [b.ms for b in self.blocks if b.active == self.base]
        return median(times) / 1000 if times else self.costs.step_s / 2

    def sound(self, plan: Keys) -> Keys:
        """The plan without keys that may have changed bits: half of the suspects at a time."""
        unequal = [keys for keys, same in self.equal.items() if not same and keys <= plan]
        if not unequal:
            return plan
        proven = frozenset().union(*(keys for keys, same in self.equal.items() if same))
        suspects = sorted(unequal[0].intersection(*unequal) - proven) or sorted(unequal[0] - proven)
        dropped = suspects[: (len(suspects) + 1) // 2] or unequal[0]
        return self.sound(plan - frozenset(dropped))

    def unchecked(self, plan: Keys) -> Keys:
        """The keys of this plan that the guard must replay together."""
        keys = plan & self.inexact
        return PLAIN if keys in self.checked else keys

    def blocks_of(self, program: Program) -> list[float]:
        """Milliseconds of the blocks of this process with its whole plan."""
        return [b.ms for b in self.blocks if b.process == program.number and b.active == program.plan]

    def fits(self, seconds: float, begun: bool = False) -> bool:
        """Whether this can be done in time. What has begun may use the overrun."""
        return self.now_s + RESERVE * seconds <= self.end_s + (self.overrun_s if begun else 0.0)


@dataclass(frozen=True)
class Start:
    """Start a process, with keys that act before it starts; it is held before it touches the device."""

    seed: int
    plan: Keys


@dataclass(frozen=True)
class Release:
    """Give a held process its plan."""

    number: int
    plan: Keys


@dataclass(frozen=True)
class Measure:
    """Alternate blocks of ready processes. ``rows``: the active keys of each block of each process.

    ``alone``: nothing else runs meanwhile.
    """

    numbers: tuple[int, ...]
    rows: tuple[tuple[Keys, ...], ...]
    alone: bool = True


@dataclass(frozen=True)
class Replay:
    """Let the guard replay a step of a ready process with these live keys."""

    number: int
    keys: Keys


@dataclass(frozen=True)
class Confirm:
    """Judge a plan by these pairs of processes, plain and planned."""

    plan: Keys
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class End:
    """End a process, and keep its record."""

    number: int


@dataclass(frozen=True)
class Wait:
    """Wait until a process that starts is held or ready."""


@dataclass(frozen=True)
class Stop:
    """End the search: the plan that was confirmed last, if any, is its result."""


Action = Start | Release | Measure | Replay | Confirm | End | Wait | Stop
