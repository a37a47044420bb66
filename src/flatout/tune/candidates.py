"""The levers of one search: the values that the program allows, their measurements and their outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.levers import TABLE
from flatout.schema.enums import Effect, Origin, Status
from flatout.schema.lever import Lever, Value
from flatout.schema.plan import Choice, Plan, format_choice
from flatout.schema.records import Ratio
from flatout.schema.session import LeverRecord

# How a ratio was measured: by switching in running programs, or between alternating programs
LIVE, PROCESSES = "live", "processes"
NO_TIME = "not measured: the budget ran out"
MEMORY_ONLY = "saves memory, but no memory limit is set; for example, add `--memory-limit 8GB`"
NO_GAIN, SLOWER = "no speed-up beyond the noise", "slower here"
DISTURBED = "other programs may have hidden its effect"
THREADS_DISTURBED = "no number of threads is chosen beside other programs; stop them and tune again"


@dataclass
class Candidate:
    """One lever in this search.

    ``value`` and ``ratio`` belong to the chosen value, or to the best value if none is chosen. ``ratio`` is
    the speed-up of the lever given the rest of the plan. ``saves_memory``: the lever is judged by the memory it
    saves, not by its speed.
    """

    lever: Lever
    values: tuple[Value, ...]
    effect: Effect
    value: Value | None = None
    ratio: Ratio | None = None
    method: str = ""
    reason: str = ""
    status: Status = Status.SKIPPED
    saves_memory: bool = False
    rejected: dict[str, str] = field(default_factory=dict)  # failed values as text, each with its reason

    @property
    def choice(self) -> Choice:
        if self.value is None:
            raise ValueError(f"no value of {self.lever.name} is chosen yet")
        return Choice(self.lever.name, self.value, Origin.TUNER)

    @property
    def selectable(self) -> bool:
        """Whether it may still be part of the plan."""
        return bool(self.values) and self.status is not Status.REJECTED and not self.saves_memory

    def reject(self, reason: str) -> None:
        self.status, self.reason = Status.REJECTED, reason

    def reject_value(self, value: Value, reason: str) -> None:
        """Remove one value; without values left, the lever is rejected."""
        self.rejected[format_choice(self.lever.name, value)] = reason
        self.values = tuple(other for other in self.values if other != value)
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
            self.method,
        )


def make_candidates(
    options: dict[str, Any],
    effects: frozenset[Effect],
    only_levers: frozenset[str] | None,
    memory_limited: bool = False,
    base: Plan | None = None,
    why_incompatible: Callable[[Lever, Plan | None], str] = lambda lever, base: "",
) -> dict[str, Candidate]:
    """Combine the answers of all levers with the restrictions of the search.

    ``base`` is the plan that applies to all its programs.
    """
    candidates = {}
    for lever in TABLE:
        if base is not None and base.get(lever.name) is not None:
            continue  # it already applies to all programs of the search
        answer = options[lever.name]
        effect = Effect(answer["effect"]) if answer.get("effect") else lever.effect
        if "skip" in answer:
            reason = answer["skip"]
        elif only_levers is not None and lever.name not in only_levers:
            reason = "not among the requested levers"
        elif effect is Effect.CHANGES_MATH:
            reason = "changes the training result, so the tuner never selects it; name it in a plan to use it"
        elif not (reason := why_incompatible(lever, base)):
            if effect not in effects:
                reason = f"its effect here is {effect}, which was not requested"
            elif lever.saves_memory and not memory_limited and only_levers is None:
                reason = MEMORY_ONLY
        values = () if reason else tuple(answer["values"])
        candidates[lever.name] = Candidate(
            lever,
            values,
            effect,
            reason=reason or NO_TIME,
            saves_memory=not reason and lever.saves_memory and memory_limited,
        )
    return candidates


def drop_slow_fetches(
    candidates: Mapping[str, Candidate],
    loaders: Iterable[Mapping[str, Any]],
    ready: Mapping[str, Any],
    max_fetch_s: float,
) -> None:
    """Remove values that fetch every sample before the first batch, if that takes longer than ``max_fetch_s``."""
    total_ms = 0.0
    for loader in loaders:
        batch_ms = ready["tick_ms"] * loader["num_workers"] or ready["data_ms"]
        total_ms += (loader["length"] or 0) / (loader["batch_size"] or 1) * batch_ms
    for candidate in candidates.values() if total_ms / 1000 > max_fetch_s else ():
        candidate.values = tuple(value for value in candidate.values if not fetches_all(value))


def fetches_all(value: Value) -> bool:
    """Whether a program with this value fetches its whole data set before its first batch."""
    return isinstance(value, dict) and bool(value.get("ahead"))


def plan_of(candidates: Iterable[Candidate]) -> Plan:
    return ordered_plan(c.choice for c in candidates)


def ordered_plan(choices: Iterable[Choice]) -> Plan:
    """A plan of these choices, in the order in which levers act."""
    return Plan(tuple(sorted(choices, key=lambda choice: TABLE.names.index(choice.name))))


def widest_effect(candidates: Iterable[Candidate]) -> Effect:
    return max((c.effect for c in candidates), key=lambda effect: effect.rank)
