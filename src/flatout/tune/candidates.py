"""The levers of one search: which values the program allows, what was measured of them, how each ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.levers import TABLE
from flatout.plan.lever import Lever, Value
from flatout.plan.plan import Choice, Plan, spell
from flatout.plan.records import Contest, LeverRecord, Ratio
from flatout.plan.words import Effect, Origin, Status

WORTH_COMBINING = 1.01
LIKELY = 0.7  # the chance of being faster that is enough to be tried together; confirmation will tell
TOO_FEW = 3  # rounds, for an interval to mean anything: where a step takes seconds there is only the median
FASTER_BY_FEW = 1.02
UNDECIDED = 1.25  # high over low of a live contest that could not tell

LIVE, PROCESSES = "live", "processes"  # how a ratio was measured
NO_TIME = "there was no time left to measure it"
FOR_MEMORY = "it gives time for memory, which was not limited (--memory-limit 8GB)"


@dataclass
class Candidate:
    """One lever in this search. ``value`` and ``ratio`` belong to the best value measured so far."""

    lever: Lever
    values: tuple[Value, ...]
    effect: Effect
    value: Value | None = None
    ratio: Ratio | None = None
    how: str = ""
    reason: str = ""
    status: Status = Status.SKIPPED
    won: bool = False
    for_memory: bool = False  # measured by what it saves, not raced

    @property
    def choice(self) -> Choice:
        if self.value is None:
            raise ValueError(f"no value of {self.lever.name} has been chosen yet")
        return Choice(self.lever.name, self.value, Origin.TUNER)

    @property
    def open(self) -> bool:
        """Still to be measured."""
        return bool(self.values) and self.ratio is None and self.status is Status.SKIPPED and not self.for_memory

    @property
    def median(self) -> float:
        """How many times as fast with it, 0 where nothing was measured."""
        return self.ratio.median if self.ratio else 0.0

    @property
    def undecided(self) -> bool:
        """A live contest compared blocks that were too unlike (episodes, sentences); programs side by side do the same work at the same tick."""
        return self.how == LIVE and self.ratio is not None and self.ratio.n >= TOO_FEW and self.ratio.high > UNDECIDED * self.ratio.low

    def measured(self, value: Value, ratio: Ratio, how: str) -> None:
        """Note a ratio; the best value counts, and says whether the lever is worth combining."""
        if self.ratio is None or ratio.median > self.ratio.median or (self.undecided and how != LIVE):
            self.value, self.ratio, self.how = value, ratio, how
        best = self.ratio
        self.won = best.median >= FASTER_BY_FEW if best.n < TOO_FEW else best.median >= WORTH_COMBINING and best.chance >= LIKELY
        if self.won:
            self.status, self.reason = Status.SKIPPED, "won alone; the search ended before it was confirmed"
        else:
            self.reject("slower here" if best.high < 1.0 else "no gain that stands out from the noise")

    def reject(self, reason: str) -> None:
        self.status, self.reason, self.won = Status.REJECTED, reason, False

    def record(self) -> LeverRecord:
        ratio = self.ratio
        return LeverRecord(self.lever.name, self.value, self.status.value, ratio.median if ratio else None, ratio.low if ratio else None,
                           ratio.high if ratio else None, ratio.n if ratio else 0, self.reason, self.effect.value, self.how)


def consider(options: dict[str, Any], effects: frozenset[Effect], only: frozenset[str] | None, limited: bool = False,
             base: Plan | None = None, unfit: Callable[[Lever, Plan | None], str] = lambda lever, base: "") -> dict[str, Candidate]:
    """What every lever said of the program, narrowed by what the person asked for. ``limited`` tells that memory is; ``base`` is what all programs of the
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


def promising_first(candidates: Mapping[str, Candidate], first: Sequence[str]) -> dict[str, Candidate]:
    """The same candidates, those named in ``first`` before the others."""
    return {name: candidates[name] for name in [*(name for name in first if name in candidates), *(name for name in candidates if name not in first)]}


def without_long_starts(candidates: Mapping[str, Candidate], loaders: Iterable[Mapping[str, Any]], ready: Mapping[str, Any], most_s: float) -> None:
    """Leave out what would fetch every sample before the first batch, where that takes longer than ``most_s``.

    A sample costs its share of the wait for a batch; where workers fetch it, at most their number times its share of a step.
    """
    total_ms = 0.0
    for loader in loaders:
        a_batch_ms = ready["tick_ms"] * loader["num_workers"] or ready["data_ms"]
        total_ms += (loader["length"] or 0) / (loader["batch_size"] or 1) * a_batch_ms
    for candidate in candidates.values() if total_ms / 1000 > most_s else ():
        candidate.values = tuple(value for value in candidate.values if not (isinstance(value, dict) and value.get("ahead")))


def recall(todo: Iterable[Candidate], contests: Iterable[Contest]) -> list[Candidate]:
    """Take over what an interrupted session has measured; answer the candidates that still have something open."""
    known = {c.plan: c for c in contests if c.against == "plain" and c.how in (LIVE, PROCESSES)}
    left = []
    for candidate in todo:
        values = []
        for value in candidate.values:
            old = known.get(spell(candidate.lever.name, value))
            if old is None:
                values.append(value)
            elif old.ratio is None or old.low is None or old.high is None:
                candidate.reject(old.note)
            else:
                candidate.measured(value, Ratio(old.ratio, old.low, old.high, old.n), old.how)
        candidate.values = tuple(values)
        if values and candidate.status is Status.SKIPPED:
            left.append(candidate)
    return left


def plan_of(candidates: Iterable[Candidate]) -> Plan:
    """Their choices, in the order in which levers act."""
    order = [lever.name for lever in TABLE]
    return Plan(tuple(sorted((c.choice for c in candidates), key=lambda choice: order.index(choice.name))))


def widest(candidates: Iterable[Candidate]) -> Effect:
    return max((c.effect for c in candidates), key=lambda effect: effect.rank)
