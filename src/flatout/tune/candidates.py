"""The levers of one search: the values that the program allows, their measurements and their outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.levers import TABLE
from flatout.schema.enums import Effect, Origin, Status
from flatout.schema.lever import Lever, Value
from flatout.schema.plan import Choice, Plan, spell
from flatout.schema.records import Ratio
from flatout.schema.session import LeverRecord

# How a ratio was measured: by switching in running programs, or between alternating programs
LIVE, PROCESSES = "live", "processes"
NO_TIME = "not measured: the budget ran out"
FOR_MEMORY = "saves memory, but no memory limit is set; for example, add `--memory-limit 8GB`"
NO_GAIN, SLOWER = "no speed-up beyond the noise", "slower here"
DISTURBED = "other programs may have hidden its effect"


@dataclass
class Candidate:
    """One lever in this search.

    ``value`` and ``ratio`` belong to the chosen value, or to the best value if none is chosen. ``ratio`` is
    the speed-up of the lever given the rest of the plan. ``for_memory``: the lever is judged by the memory it
    saves, not by its speed.
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
    rejected: dict[str, str] = field(default_factory=dict)  # failed values as text, each with its reason

    @property
    def choice(self) -> Choice:
        if self.value is None:
            raise ValueError(f"no value of {self.lever.name} is chosen yet")
        return Choice(self.lever.name, self.value, Origin.TUNER)

    @property
    def open(self) -> bool:
        """Whether it may still be part of the plan."""
        return bool(self.values) and self.status is not Status.REJECTED and not self.for_memory

    def reject(self, reason: str) -> None:
        self.status, self.reason = Status.REJECTED, reason

    def without(self, value: Value, reason: str) -> None:
        """Remove one value; without values left, the lever is rejected."""
        self.rejected[spell(self.lever.name, value)] = reason
        self.values = tuple(each for each in self.values if each != value)
        if not self.values:
            self.value = value
            self.reject(reason)

    def record(self) -> LeverRecord:
        ratio = self.ratio
        return LeverRecord(
            self.lever.name,
            self.value,
            self.status.value,
            ratio.median if ratio else None,
            ratio.low if ratio else None,
            ratio.high if ratio else None,
            ratio.n if ratio else 0,
            self.reason,
            self.effect.value,
            self.how,
        )


def consider(
    options: dict[str, Any],
    effects: frozenset[Effect],
    only: frozenset[str] | None,
    limited: bool = False,
    base: Plan | None = None,
    unfit: Callable[[Lever, Plan | None], str] = lambda lever, base: "",
) -> dict[str, Candidate]:
    """Combine the answers of all levers with the restrictions of the search.

    ``limited``: memory is limited. ``base`` is the plan that applies to all programs of the search, and
    ``unfit`` says why a lever cannot be combined with it.
    """
    found = {}
    for lever in TABLE:
        if base is not None and base.get(lever.name) is not None:
            continue  # it already applies to all programs of the search
        answer = options[lever.name]
        if "skip" in answer:
            found[lever.name] = Candidate(lever, (), lever.effect, reason=answer["skip"])
            continue
        effect = Effect(answer["effect"]) if answer["effect"] else lever.effect
        if only is not None and lever.name not in only:
            found[lever.name] = Candidate(lever, (), effect, reason="not among the requested levers")
        elif effect is Effect.CHANGES_MATH:
            found[lever.name] = Candidate(
                lever,
                (),
                effect,
                reason="changes the training result, so the tuner never selects it; name it in a plan to use it",
            )
        elif apart := unfit(lever, base):
            found[lever.name] = Candidate(lever, (), effect, reason=apart)
        elif effect not in effects:
            found[lever.name] = Candidate(
                lever, (), effect, reason=f"its effect here is {effect}, which was not requested"
            )
        elif lever.saves_memory and not limited and only is None:
            found[lever.name] = Candidate(lever, (), effect, reason=FOR_MEMORY)
        else:
            found[lever.name] = Candidate(
                lever,
                tuple(answer["values"]),
                effect,
                reason=NO_TIME,
                for_memory=lever.saves_memory and limited,
            )
    return found


def without_long_starts(
    candidates: Mapping[str, Candidate],
    loaders: Iterable[Mapping[str, Any]],
    ready: Mapping[str, Any],
    most_s: float,
) -> None:
    """Remove values that fetch every sample before the first batch, if that takes longer than ``most_s``.

    A sample costs its share of the wait for a batch. With workers it costs at most its share of a step times
    their number.
    """
    total_ms = 0.0
    for loader in loaders:
        a_batch_ms = ready["tick_ms"] * loader["num_workers"] or ready["data_ms"]
        total_ms += (loader["length"] or 0) / (loader["batch_size"] or 1) * a_batch_ms
    for candidate in candidates.values() if total_ms / 1000 > most_s else ():
        candidate.values = tuple(value for value in candidate.values if not fetches_all(value))


def fetches_all(value: Value) -> bool:
    """Whether a program with this value fetches its whole data set before its first batch."""
    return isinstance(value, dict) and bool(value.get("ahead"))


def plan_of(candidates: Iterable[Candidate]) -> Plan:
    """Return the plan of these candidates, in the order in which levers act."""
    return in_order(c.choice for c in candidates)


def in_order(choices: Iterable[Choice]) -> Plan:
    """Return a plan of these choices, in the order in which levers act."""
    return Plan(tuple(sorted(choices, key=lambda choice: TABLE.names.index(choice.name))))


def widest(candidates: Iterable[Candidate]) -> Effect:
    return max((c.effect for c in candidates), key=lambda effect: effect.rank)
