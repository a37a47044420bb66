"""Balance of the ranks of a program: which rank is slow, how often, and whether its data is the cause.

All ranks end a step together, because they wait for each other in the exchange of gradients. A rank's own
time is the step without the exchange: waiting for data, and computation. The shortest exchange of a step is
the exchange itself; more is waiting for a slower rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.measure.statistics import mean, median
from flatout.schema.session import RankPace

STRAGGLES = 0.7  # a rank straggles if it is the slowest in this share of the steps
WORTH_SAYING = 0.05  # a smaller loss per step is not reported
LARGER = 1.1  # a rank with this multiple of the mean elements has more data


def paces(observed: Sequence[dict[str, Any]]) -> list[RankPace]:
    """Return the pace of each rank, in rank order.

    ``observed`` is what the probe of each rank (`flatout.trial.probes.pace`) recorded, step by step.
    """
    found = []
    for each in sorted(observed, key=lambda each: int(each["rank"])):
        own = [step - exchange for step, exchange in zip(each["step_ms"], each["exchange_ms"], strict=True)]
        found.append(
            RankPace(
                each["rank"],
                each["host"],
                median(each["step_ms"]),
                median(each["data_ms"]),
                median(own) - median(each["data_ms"]),
                median(each["exchange_ms"]),
                mean(each["samples"]),
                mean(each["elements"]),
            )
        )
    return found


def lost_ms(observed: Sequence[dict[str, Any]]) -> float:
    """Return how much longer the slowest rank took than the mean of all ranks, averaged over steps."""
    return mean([max(owns) - mean(owns) for owns in _own_by_step(observed)])


def imbalance(observed: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on the slowest rank and the cause, or "" if the ranks are balanced."""
    owns = _own_by_step(observed)
    lost, step = lost_ms(observed), mean([ms for each in observed for ms in each["step_ms"]])
    if len(observed) < 2 or lost < WORTH_SAYING * step:
        return ""
    slowest = [max(range(len(observed)), key=row.__getitem__) for row in owns]
    often = max(set(slowest), key=slowest.count)
    share = slowest.count(often) / len(slowest)
    larger = mean(
        [
            each["elements"][at] * len(observed) / max(1.0, sum(other["elements"][at] for other in observed))
            for at, number in enumerate(slowest)
            for each in (observed[number],)
        ]
    )
    costs = f"{lost:.1f} ms of a step of {step:.1f} ms are spent waiting for the slowest rank"
    data = f"it has {larger:.2f} times as much data as the mean in those steps, so samples differ in size: batches of similar lengths would balance this"
    if share < STRAGGLES:
        return f"{costs}, which is not always the same. " + (
            data[0].upper() + data[1:] if larger >= LARGER else "Their shares of the data are equal"
        )
    rank = observed[often]
    waits, others = (
        median(rank["data_ms"]),
        median([ms for each in observed if each is not rank for ms in each["data_ms"]]),
    )
    if larger >= LARGER:
        why = data
    elif waits - others > lost / 2:
        why = f"it waits {waits:.1f} ms for its data, the others {others:.1f} ms"
    else:
        why = "its data is like that of the others, so its device or its cores are slower, or shared with other programs"
    return f"{costs}: in {share:.0%} of the steps rank {rank['rank']} on {rank['host']}; {why}"


def _own_by_step(observed: Sequence[dict[str, Any]]) -> list[list[float]]:
    steps = min((len(each["step_ms"]) for each in observed), default=0)
    return [[each["step_ms"][at] - each["exchange_ms"][at] for each in observed] for at in range(steps)]
