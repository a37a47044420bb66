"""Which operators account for the difference between two programs: `flatout compare --blame`.

Each program of a pair records some steps. Recorded steps are longer, so an operator counts with its share of
them, times the step time of the pair's blocks. Operators of A and B are matched by function and text of the
user's line, then by name, dtype and shapes. The mean difference over the pairs has Student's interval.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flatout.compare.evaluate import LEVEL
from flatout.compare.pairs import Pair, Run
from flatout.measure.statistics import Estimate, estimate, median
from flatout.schema.compare import Blame, BlameRow, Change
from flatout.schema.findings import SourceLocation
from flatout.schema.profile import Operation
from flatout.schema.records import CONFIDENCE

PYTHON, WAITING = "Python between operators", "waiting for data"
IDLE, REST = "the device is idle", "not assigned"
MIN_SHARE = 0.05  # of the whole difference; smaller rows are not blamed
MORE_CALLS = 1.02
NAMED_SHARE, MAX_NAMES, MAX_ROWS = 0.1, 3, 60
Site = tuple[str, str]  # function and text of the user's line


class Key(NamedTuple):
    site: Site
    name: str
    dtype: str = ""
    shapes: str = ""


@dataclass
class Cost:
    """``ms`` of a step in each pair, calls a step, and the line."""

    ms: list[float]
    calls: float = 0.0
    place: SourceLocation | None = None


Costs = dict[Key, Cost]  # of one side
Match = tuple[list[Key], list[Key]]  # of A, of B


def blame(pairs: Sequence[Pair], step_time: Change | None) -> Blame:
    """Name the rows that account for the difference. ``step_time``: the change of these pairs."""
    runs = [(pair.a, pair.b) for pair in pairs if pair.b and pair.a.operations and pair.b.operations]
    if len(runs) < 2:
        return Blame(f"the operators of {len(runs)} pairs could be recorded, of at least 2")
    middles = [(a.log_ms + b.log_ms) / 2 for a, b in runs]  # the speed of a shared machine drifts
    drifts = [median(middles) - middle for middle in middles]
    sides = list(zip(*runs, strict=True))
    times = [[math.exp(run.log_ms + drifts[i]) for i, run in enumerate(side)] for side in sides]
    whole = estimate([b - a for a, b in zip(*times, strict=True)], LEVEL)
    a, b = map(costs_of, sides, times)
    found = [
        _row({key: a[key] for key in old}, {key: b[key] for key in new}, whole) for old, new in match(a, b)
    ]
    sign = math.copysign(1.0, whole.mean)
    found.sort(key=lambda row: (not row.blamed, -sign * row.ms if row.blamed else -abs(row.ms)))
    shares = [row.share for row in found if row.blamed]
    verdict = f"{100 * sum(shares):.0f} % of it is in {len(shares)} rows" if shares else "in no row alone"
    if step_time is None or not step_time.significant:
        found, verdict = [replace(row, blamed=False) for row in found], "no difference: nothing to blame"
    old, new = map(_settings, runs[0])
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    settings = [f"{name}: {old.get(name)} in A, {new.get(name)} in B" for name in names]
    return Blame(verdict, whole.mean, whole.low, whole.high, whole.n, found[:MAX_ROWS], settings)


def _settings(run: Run) -> dict[str, Any]:
    found = {**(run.operations or {})["settings"], **run.record.versions}
    for optimizer in found.get("optimizers", ()):
        found |= {f"optimizer.{name}": value for name, value in optimizer.items()}
    return {name: value for name, value in found.items() if not isinstance(value, (dict, list))}


def costs_of(runs: Sequence[Run], steps_ms: Sequence[float]) -> Costs:
    """What the parts of a step cost in the runs of one side. They add up to ``steps_ms``."""
    costs: Costs = defaultdict(lambda: Cost([0.0] * len(runs)))
    for i, (run, step_ms) in enumerate(zip(runs, steps_ms, strict=True)):
        recorded = run.operations or {}
        waiting_ms, python_ms = step_ms * recorded["waiting_share"], step_ms * recorded["python_share"]
        left_ms, operators_ms, last = step_ms, step_ms - waiting_ms - python_ms, REST
        for operation in map(Operation.from_json, recorded["operations"]):
            place, ms = operation.place, operators_ms * operation.share
            if operation.device_ms is not None:  # kernels take as long as if they were not recorded
                ms, python_ms, last = operation.device_ms, 0.0, IDLE
            function = place.function.split(".<locals>")[0].rpartition(".")[2] if place else ""
            site = function, (place.text or str(place.line) if place else "")
            name = operation.name.removeprefix("autograd::engine::evaluate_function: ")
            cost = costs[Key(site, name, " ".join(operation.dtypes), " ".join(operation.shapes))]
            cost.ms[i] += ms
            cost.calls += operation.calls / len(runs)
            cost.place = cost.place or place
            left_ms -= ms
        waiting_ms = min(waiting_ms, max(0.0, left_ms))
        for name, ms in (
            (WAITING, waiting_ms),
            (PYTHON, python_ms),
            (last, left_ms - waiting_ms - python_ms),
        ):
            costs[Key((name, ""), name)].ms[i] += ms
    return costs


def match(a: Costs, b: Costs) -> list[Match]:
    """Pair operators: at the same site; then whatever replaced them there; then those that moved."""
    group = _groups(a, b)
    levels: list[Callable[[Key], Hashable]] = [
        lambda key: (group[key.site], *key[1:]),
        lambda key: (group[key.site], key.name),
        lambda key: group[key.site],
        lambda key: key[1:],
        lambda key: key.name,
        lambda key: group[key.site],
    ]
    matches: list[Match] = []
    left = [list(a), list(b)]
    for level in levels:
        found: dict[Hashable, Match] = defaultdict(lambda: ([], []))
        for side, keys in enumerate(left):
            for key in keys:
                found[level(key)][side].append(key)
        matches += [pair for pair in found.values() if all(pair) or level is levels[-1]]
        left = [[key for pair in found.values() if not all(pair) for key in pair[side]] for side in (0, 1)]
    return matches


def _groups(a: Costs, b: Costs) -> dict[Site, Hashable]:
    """Give lines of only one side, behind the same line of both sides, a common name: one was edited."""
    common = {key.site for key in a} & {key.site for key in b}
    groups: dict[Site, Hashable] = {key.site: key.site for key in (*a, *b)}
    for costs in (a, b):
        before: dict[str, Site] = {}
        placed = [(cost.place, key.site) for key, cost in costs.items() if cost.place]
        for _, site in sorted(placed, key=lambda each: (each[0].file, each[0].line)):
            if site in common:
                before[site[0]] = site
            else:
                groups[site] = site[0], before.get(site[0])
    return groups


def _row(a: Costs, b: Costs, whole: Estimate) -> BlameRow:
    times = [[sum(cost.ms[i] for cost in side.values()) for i in range(whole.n)] for side in (a, b)]
    change = estimate([new - old for old, new in zip(*times, strict=True)], CONFIDENCE)
    old, new = _names(a), _names(b)
    calls = [sum(side[key].calls for key in side if key.name in old + new) for side in (a, b)]
    return BlameRow(
        " + ".join(new or old),
        _changed(a, b, calls, change.mean),
        change.mean,
        change.low,
        change.high,
        change.mean / whole.mean if whole.mean else 0.0,
        calls[0],
        calls[1],
        " + ".join(old) if new and old != new else "",
        max((b or a).values(), key=lambda cost: sum(cost.ms)).place,
        (change.low > 0 or change.high < 0) and abs(change.mean) >= MIN_SHARE * abs(whole.mean),
    )


def _names(side: Costs) -> list[str]:
    """The names of the costliest operators."""
    times: dict[str, float] = defaultdict(float)
    for key, cost in side.items():
        times[key.name] += sum(cost.ms)
    limit = NAMED_SHARE * sum(times.values())
    return [name for name in sorted(times, key=lambda name: -times[name])[:MAX_NAMES] if times[name] >= limit]


def _changed(a: Costs, b: Costs, calls: Sequence[float], ms: float) -> str:
    if not (a and b):
        return "new" if b else "gone"
    if min(a).name in (PYTHON, WAITING, IDLE, REST):
        return "longer" if ms > 0 else "shorter"
    if {key.name for key in a} != {key.name for key in b}:
        return "replaced"
    words = []
    if max(calls) > MORE_CALLS * min(calls):
        words.append("more calls" if calls[1] > calls[0] else "fewer calls")
    for noun in ("dtype", "shapes"):
        old, new = ({key._asdict()[noun] for key in side} for side in (a, b))
        if old != new:
            texts = (", ".join(sorted(side)[:2]) for side in (old - new, new - old))
            words.append(f"other {noun}: {' -> '.join(texts)}")
    return ", ".join(words) or f"{'slower' if ms > 0 else 'faster'} at the same calls"
