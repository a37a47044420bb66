"""Three search strategies on a simulated machine (`simulated_programs.py`), evaluated at several times.

one at a time     each live lever against plain in one process, A B B A, then each other lever in a process
                  paired with a plain one
races             the former search of `flatout tune`: live race, process race with a second plain program
                  (A/A), winners together, each removed again
factorial         the functions of `flatout.tune.effects` and `flatout.tune.design`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from provenance import SRC  # noqa: F401  puts src on the path
from simulated_programs import WARM_UP_S, Machine

from flatout.tune.design import live_factor_sets, next_processes
from flatout.tune.effects import Fitted, TimedBlock, fit_effects
from flatout.tune.space import Factor, Space

NONE: frozenset[str] = frozenset()
DRAWS = 800  # of the bootstrap


@dataclass(frozen=True)
class Ratio:
    """Returns the speed-up from the log ratios of rounds: their mean, and a bootstrap interval of 95 %."""

    median: float
    low: float
    high: float
    n: int

    @staticmethod
    def of(logs: Sequence[float], rng: np.random.Generator) -> Ratio:
        values = np.array(logs)
        centre = float(values.mean())
        low, high = np.quantile(
            values[rng.integers(len(values), size=(DRAWS, len(values)))].mean(axis=1), (0.025, 0.975)
        )
        if len(values) < 3:
            reach = float(np.ptp(values)) if len(values) > 1 else 0.1
            low, high = min(low, centre - reach), max(high, centre + reach)
        return Ratio(math.exp(centre), math.exp(min(low, centre)), math.exp(max(high, centre)), len(values))

    def against(self, factor: float) -> Ratio:
        return Ratio(self.median / factor, self.low / factor, self.high / factor, self.n)

    @property
    def chance(self) -> float:
        if not 0 < self.low < self.median:
            return float(self.median > 1)
        return 0.5 * math.erfc(
            -1.959964 * math.log(self.median) / math.log(self.median / self.low) / math.sqrt(2)
        )


# -- one at a time -------------------------------------------------------------------------------------------


def one_at_a_time(machine: Machine, space: Space, budget_s: float) -> frozenset[str]:
    """Spends 45 % of the time on live levers."""
    (plain,) = machine.start(NONE)
    window, gains = 0, {}
    live = [factor for factor in space.factors if factor.switchable]
    each = max(1, int((0.45 * budget_s - machine.now_s) / max(len(live), 1) / machine.block_s / 4))
    for factor in live:
        if machine.now_s + 4 * machine.block_s > budget_s:
            break
        rounds = []
        for _ in range(each):
            a1, b1, b2, a2 = (
                math.log(machine.block_ms(plain, on, window + at))
                for at, on in enumerate((NONE, {factor.key}, {factor.key}, NONE))
            )
            rounds.append((a1 + a2 - b1 - b2) / 2)
            window += 4
        gains[factor.key] = float(np.median(rounds))
    others = [factor for factor in space.factors if not factor.switchable]
    count = max(
        0, min(len(others), int((budget_s - machine.now_s) / (machine.process_s + 6 * machine.block_s)) - 1)
    )
    if count:
        numbers = [
            machine.start(on)[0] for on in (NONE, *(frozenset({factor.key}) for factor in others[:count]))
        ]
        rows: list[list[float]] = [[] for _ in range(count)]
        while machine.now_s + (count + 1) * machine.block_s <= budget_s or not rows[0]:
            a = math.log(machine.block_ms(numbers[0], NONE, window))
            for at, factor in enumerate(others[:count]):
                rows[at].append(
                    a - math.log(machine.block_ms(numbers[1 + at], frozenset({factor.key}), window))
                )
            window += 1
        gains |= {factor.key: float(np.median(row)) for factor, row in zip(others, rows, strict=False)}
    return _best_values(space, {key: gain for key, gain in gains.items() if gain > 0.01})


def _best_values(space: Space, gains: dict[str, float]) -> frozenset[str]:
    """Returns the largest gains that are compatible."""
    chosen: frozenset[str] = NONE
    for key in sorted(gains, key=lambda key: -gains[key]):
        if space.allowed(chosen | {key}):
            chosen |= {key}
    return chosen


# -- races ---------------------------------------------------------------------------------------------------


@dataclass
class _Candidate:
    """A lever in the races: its values, the best one so far and its ratio."""

    factors: list[Factor]
    value: Factor | None = None
    ratio: Ratio | None = None
    live_ratio: bool = False
    won: bool = False
    closed: bool = False
    order: list[Factor] = field(default_factory=list)

    @property
    def undecided(self) -> bool:
        return (
            self.live_ratio
            and self.ratio is not None
            and self.ratio.n >= 3
            and self.ratio.high > 1.25 * self.ratio.low
        )

    def measured(self, value: Factor, ratio: Ratio, live: bool) -> None:
        if self.ratio is None or ratio.median > self.ratio.median or (self.undecided and not live):
            self.value, self.ratio, self.live_ratio = value, ratio, live
        best = self.ratio
        self.won = best.median >= 1.02 if best.n < 3 else best.median >= 1.01 and best.chance >= 0.7
        self.closed = True


class Races:
    """The rules of the search by races, in their order, with their time shares and thresholds."""

    EXACT = ("malloc", "gc_pause", "debug_off", "inplace")

    def __init__(self, machine: Machine, space: Space, budget_s: float) -> None:
        self.machine, self.space, self.until_s = machine, space, budget_s
        self.candidates = {
            lever: _Candidate([space.factors[at] for at in columns])
            for lever, columns in space.columns_of.items()
        }
        self.window = 0

    def search(self) -> frozenset[str]:
        (self.plain,) = self.machine.start(NONE)
        self.start_s = self.machine.process_s
        self._live_race()
        self._process_race()
        return self._combine()

    @property
    def left_s(self) -> float:
        return self.until_s - self.machine.now_s

    def _least_race_s(self, contenders: int) -> float:
        return 2 * self.start_s + 4 * self.machine.block_s * (contenders + 2)

    def _live(self, process: int, a: frozenset[str], b: frozenset[str], until_s: float) -> Ratio:
        """Runs A B B A until the result is clear or the time is over."""
        logs: list[float] = []
        while True:
            a1, b1, b2, a2 = (
                math.log(self.machine.block_ms(process, on, self.window + at))
                for at, on in enumerate((a, b, b, a))
            )
            self.window += 4
            logs += [a1 - b1, a2 - b2]
            ratio = Ratio.of(logs, self.machine.rng)
            decided = len(logs) >= 3 and (ratio.high < 0.99 or (ratio.low > 1.03 and len(logs) >= 6))
            if self.machine.now_s >= until_s or decided:
                return ratio

    def _live_race(self) -> None:
        left_s = max(0.0, self.left_s)
        until_s = self.machine.now_s + (0.5 * left_s if 0.5 * left_s > self._least_race_s(1) else left_s)
        todo = sorted(
            (c for c in self.candidates.values() if c.factors[0].live), key=lambda c: c.factors[0].warms_up
        )
        for at, candidate in enumerate(todo):
            left_s, factor = until_s - self.machine.now_s, candidate.factors[0]
            if left_s < (75.0 if factor.warms_up else 6 * self.machine.block_s):
                continue
            end_s = self.machine.now_s + min(12.0, left_s / (len(todo) - at))
            if factor.warms_up:
                self.machine.now_s += WARM_UP_S
                end_s = max(end_s, self.machine.now_s + 8 * self.machine.block_s)
            candidate.measured(
                factor, self._live(self.plain, NONE, frozenset({factor.key}), end_s), live=True
            )

    def _lineups(self) -> list[tuple[Factor, ...]]:
        levers = [c for c in self.candidates.values() if not c.closed and not c.factors[0].live]
        unclear = sorted(
            (c for c in self.candidates.values() if c.undecided and not c.factors[0].warms_up),
            key=lambda c: -(c.ratio.median if c.ratio else 0),
        )
        found = [(c.factors[depth],) for depth in range(4) for c in levers if depth < len(c.factors)]
        together = []
        if "loader" in self.candidates and "threads" in self.candidates:
            together.append((self.candidates["threads"].factors[0], self.candidates["loader"].factors[0]))
        if "cached_prefix" in self.candidates and "batched_transforms" in self.candidates:
            together.append(
                (
                    self.candidates["cached_prefix"].factors[0],
                    self.candidates["batched_transforms"].factors[0],
                )
            )
        return [*found[:2], (), *together, *((c.value,) for c in unclear if c.value is not None), *found[2:]]

    def _process_race(self) -> None:
        racing: list[tuple[tuple[Factor, ...], int]] = []
        for lineup in self._lineups()[:8]:
            if self.left_s < self._least_race_s(len(racing) + 1):
                break
            racing.append((lineup, self.machine.start(frozenset(f.key for f in lineup))[0]))
        if not racing:
            return
        plain = self.plain
        if self.left_s >= 2 * self.start_s:
            (plain,) = self.machine.start(NONE)
        elif any(not lineup for lineup, _ in racing) and len(racing) > 1:
            counterpart = next(entry for entry in racing if not entry[0])
            racing.remove(counterpart)
            plain = counterpart[1]
        kept_s = self.start_s + 20 * self.machine.block_s
        until_s = self.machine.now_s + min(
            max(12 * self.machine.block_s * (len(racing) + 1), 15.0),
            max(self.left_s - kept_s, 0.6 * self.left_s),
        )
        self._judge(racing, self._take_turns(plain, racing, until_s))

    def _take_turns(
        self, plain: int, racing: list[tuple[tuple[Factor, ...], int]], until_s: float
    ) -> list[Ratio]:
        logs: list[list[float]] = [[] for _ in racing]
        verdicts: list[Ratio | None] = [None] * len(racing)
        while True:
            a = math.log(self.machine.block_ms(plain, NONE, self.window))
            for at, (lineup, process) in enumerate(racing):
                verdict = verdicts[at]
                if verdict is None or len(logs[at]) < 3 or verdict.high >= 0.99:  # a clear loser is out
                    logs[at].append(
                        a
                        - math.log(
                            self.machine.block_ms(process, frozenset(f.key for f in lineup), self.window)
                        )
                    )
                    verdicts[at] = Ratio.of(logs[at], self.machine.rng)
            self.window += 1
            if self.machine.now_s >= until_s or all(
                v is not None and len(rows) >= 3 and v.high < 0.99
                for v, rows in zip(verdicts, logs, strict=True)
            ):
                return [verdict for verdict in verdicts if verdict is not None]

    def _judge(self, racing: list[tuple[tuple[Factor, ...], int]], verdicts: list[Ratio]) -> None:
        counterpart = next(
            (verdict for (lineup, _), verdict in zip(racing, verdicts, strict=True) if not lineup), None
        )
        luck = math.sqrt(counterpart.median) if counterpart is not None else 1.0
        for (lineup, _), verdict in sorted(
            zip(racing, verdicts, strict=True), key=lambda entry: len(entry[0][0])
        ):
            ratio, parts = verdict.against(luck), [self.candidates[factor.lever] for factor in lineup]
            alone = (
                max((c.ratio.median if c.ratio else 0.0 for c in parts), default=0.0)
                if len(parts) > 1
                else 0.0
            )
            if len(parts) == 1 or (parts and ratio.median > alone and ratio.low > 1):
                for factor, candidate in zip(lineup, parts, strict=True):
                    candidate.measured(factor, ratio, live=False)

    def _combine(self) -> frozenset[str]:
        winners = [c for c in self.candidates.values() if c.won and c.value is not None]
        for lever, candidate in self.candidates.items():
            if not candidate.closed and lever in self.EXACT:
                candidate.value = candidate.factors[0]
                winners.append(candidate)
        kept = _allowed_values(self.space, winners)
        if len(kept) < 2 or self.left_s < self.start_s + 6 * self.machine.block_s * len(kept):
            return frozenset(factor.key for factor in kept)
        (process,) = self.machine.start(frozenset(factor.key for factor in kept))
        live = [factor for factor in kept if factor.switchable and self.candidates[factor.lever].live_ratio]
        for at, factor in enumerate(live):
            if self.left_s < 6 * self.machine.block_s or len(kept) < 2:
                break
            on = frozenset(other.key for other in kept)
            ratio = self._live(
                process, on - {factor.key}, on, self.machine.now_s + min(12.0, self.left_s / (len(live) - at))
            )
            if ratio.median < 1.003:
                kept.remove(factor)
        return frozenset(factor.key for factor in kept)


def _allowed_values(space: Space, winners: Sequence[_Candidate]) -> list[Factor]:
    kept: list[Factor] = []
    for candidate in sorted(winners, key=lambda c: -(c.ratio.median if c.ratio else 0.0)):
        if candidate.value is not None and space.allowed(frozenset(f.key for f in (*kept, candidate.value))):
            kept.append(candidate.value)
    return kept


# -- factorial -----------------------------------------------------------------------------------------------


WAVE = 2  # programs that start together
FIRST_ROWS = 6  # of the observed plain program, before any other starts
BESIDE_ROWS = 2  # of the plain program in each wave
MOST_ROWS = 10  # of each program of a wave
MEASURE_SHARE = 0.5  # measuring time relative to the start-up time


def factorial(
    machine: Machine, space: Space, budgets_s: Sequence[float], blocks: list[TimedBlock] | None = None
) -> Iterator[tuple[float, Fitted]]:
    """Returns the choice at each of ``budgets_s``, ascending: one search, which never reads its budget.

    It appends its blocks to ``blocks``.
    """
    blocks = [] if blocks is None else blocks
    todo = list(budgets_s)
    rng = machine.rng
    (plain,) = machine.start(NONE)
    window = 0

    def measure(
        numbers: Sequence[int], on: Sequence[frozenset[str]], rows: Sequence[Sequence[frozenset[str]]]
    ) -> Iterator[tuple[float, Fitted]]:
        """Interleaves blocks; the processes do the same work in the same turn."""
        nonlocal window
        for turn in range(max(map(len, rows))):
            window += 1
            for process, fixed, live in zip(numbers, on, rows, strict=True):
                if turn < len(live):
                    while todo and machine.now_s + machine.block_s > todo[0]:
                        yield todo.pop(0), fit_effects(space, blocks)
                    ms = machine.block_ms(process, fixed | live[turn], window)
                    blocks.append(TimedBlock(process, fixed | live[turn], machine.now_s, window, ms))

    yield from measure([plain], [NONE], [[NONE, *live_factor_sets(space, None, NONE, FIRST_ROWS - 1, rng)]])
    start_s = machine.process_s * (1 + 0.3 * (WAVE - 1))
    each = min(MOST_ROWS, max(3, round(MEASURE_SHARE * start_s / machine.block_s / WAVE)))
    while todo:
        known = fit_effects(space, blocks)
        waiting = next_processes(space, known, blocks, WAVE, rng)
        numbers = machine.start(*waiting)
        rows = [live_factor_sets(space, known, on, each, rng) for on in waiting]
        beside = [NONE, *live_factor_sets(space, known, NONE, BESIDE_ROWS - 1, rng)]
        yield from measure([*numbers, plain], [*waiting, NONE], [*rows, beside])
