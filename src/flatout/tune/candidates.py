"""The levers of one search: which values the program allows, what was measured of them, how each ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.levers import TABLE
from flatout.plan.lever import Lever, Value
from flatout.plan.plan import Choice, Plan, spell
from flatout.plan.records import LeverRecord, Ratio
from flatout.plan.words import Effect, Origin, Status

LIVE, PROCESSES = "live", "processes"  # how a ratio was measured: switched in running programs, or between programs that take turns
NO_TIME = "there was no time left to measure it"
FOR_MEMORY = "it saves memory, and no limit was given (for example `--memory-limit 8GB`)"
NO_GAIN, SLOWER = "no gain that stands out from the noise", "slower here"


@dataclass
class Candidate:
    """One lever in this search. ``value`` and ``ratio`` belong to the value that the search would take, or came nearest to taking.

    ``ratio`` is what the lever brings beside the rest of the plan. ``for_memory``: measured by what it saves, not for its speed.
    """

    lever: Lever
    values: tuple[Value, ...]
    effect: Effect
    value: Value | None = None
    ratio: Ratio | None = None
    how: str = ""
    reason: str = ""
    status: Status = Status.SKIPPED
    for_memory: bool = False
    rejected: dict[str, str] = field(default_factory=dict)  # values that failed, spelled, with the reason of each

    @property
    def choice(self) -> Choice:
        if self.value is None:
            raise ValueError(f"no value of {self.lever.name} has been chosen yet")
        return Choice(self.lever.name, self.value, Origin.TUNER)

    @property
    def open(self) -> bool:
        """Whether it may still be part of the plan."""
        return bool(self.values) and self.status is not Status.REJECTED and not self.for_memory

    def reject(self, reason: str) -> None:
        self.status, self.reason = Status.REJECTED, reason

    def without(self, value: Value, reason: str) -> None:
        """Leave one value out; the lever is rejected with the last of them."""
        self.rejected[spell(self.lever.name, value)] = reason
        self.values = tuple(each for each in self.values if each != value)
        if not self.values:
            self.value = value
            self.reject(reason)

    def record(self) -> LeverRecord:
        ratio = self.ratio
        return LeverRecord(self.lever.name, self.value, self.status.value, ratio.median if ratio else None, ratio.low if ratio else None,
                           ratio.high if ratio else None, ratio.n if ratio else 0, self.reason, self.effect.value, self.how)


def consider(options: dict[str, Any], effects: frozenset[Effect], only: frozenset[str] | None, limited: bool = False,
             base: Plan | None = None, unfit: Callable[[Lever, Plan | None], str] = lambda lever, base: "") -> dict[str, Candidate]:
    """What every lever said of the program, narrowed by what was asked for. ``limited``: memory is; ``base`` is what all programs of the
    search run under, and ``unfit`` says why a lever cannot join it."""
    found = {}
    for lever in TABLE:
        if base is not None and base.get(lever.name) is not None:
            continue  # it holds for all programs of the search
        answer = options[lever.name]
        if "skip" in answer:
            found[lever.name] = Candidate(lever, (), lever.effect, reason=answer["skip"])
            continue
        effect = Effect(answer["effect"]) if answer["effect"] else lever.effect
        if only is not None and lever.name not in only:
            found[lever.name] = Candidate(lever, (), effect, reason="it was not among the levers asked for")
        elif effect is Effect.CHANGES_MATH:
            found[lever.name] = Candidate(lever, (), effect, reason="it changes what is learned, so it is only used by name in a plan, never by the tuner")
        elif apart := unfit(lever, base):
            found[lever.name] = Candidate(lever, (), effect, reason=apart)
        elif effect not in effects:
            found[lever.name] = Candidate(lever, (), effect, reason=f"its effect here is {effect}, which was not asked for")
        elif lever.saves_memory and not limited and only is None:
            found[lever.name] = Candidate(lever, (), effect, reason=FOR_MEMORY)
        else:
            found[lever.name] = Candidate(lever, tuple(answer["values"]), effect, reason=NO_TIME, for_memory=lever.saves_memory and limited)
    return found


def without_long_starts(candidates: Mapping[str, Candidate], loaders: Iterable[Mapping[str, Any]], ready: Mapping[str, Any], most_s: float) -> None:
    """Leave out what would fetch every sample before the first batch, where that takes longer than ``most_s``.

    A sample costs its share of the wait for a batch; where workers fetch it, at most their number times its share of a step.
    """
    total_ms = 0.0
    for loader in loaders:
        a_batch_ms = ready["tick_ms"] * loader["num_workers"] or ready["data_ms"]
        total_ms += (loader["length"] or 0) / (loader["batch_size"] or 1) * a_batch_ms
    for candidate in candidates.values() if total_ms / 1000 > most_s else ():
        candidate.values = tuple(value for value in candidate.values if not fetches_all(value))


def fetches_all(value: Value) -> bool:
    """Whether a program under this value fetches its whole data set before its first batch."""
    return isinstance(value, dict) and bool(value.get("ahead"))


def plan_of(candidates: Iterable[Candidate]) -> Plan:
    """Their choices, in the order in which levers act."""
    return in_order(c.choice for c in candidates)


def in_order(choices: Iterable[Choice]) -> Plan:
    """A plan of these choices, in the order in which levers act."""
    order = [lever.name for lever in TABLE]
    return Plan(tuple(sorted(choices, key=lambda choice: order.index(choice.name))))


def widest(candidates: Iterable[Candidate]) -> Effect:
    return max((c.effect for c in candidates), key=lambda effect: effect.rank)
