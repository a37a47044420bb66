"""Summary of the ranks of a session."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from markupsafe import Markup

from flatout.render.before_after import PhasePart
from flatout.render.charts import bar
from flatout.render.formatting import (
    count,
    drawable,
    figure,
    interval,
    milliseconds,
    one_line,
    sentence,
    several,
    size,
    times,
)
from flatout.render.svg import chart
from flatout.schema.session import RankPace, RanksRecord, SessionRecord

MOST_RANKS = 32  # shown; the rest is in session.json
ROW = 62
MORE_THAN_ALL = 1.1  # a share of ideal scaling above this is implausible


def summary(session: SessionRecord) -> str:
    """Return the speed-up over one process in a sentence, or "" for a program without ranks."""
    found = session.ranks
    if found is None:
        return ""
    who, ratio = several(found.procs, "rank"), found.ratio
    median = drawable(ratio.median) if ratio is not None else None
    if ratio is None or median is None:
        return sentence(f"{who}; {one_line(found.why_not)}") if found.why_not else f"{who}."
    inside, procs, high = interval(ratio.low, ratio.high), drawable(found.procs), drawable(ratio.high)
    said = f"{who} are {times(median)[:-1]} times as fast as one process" + (f" ({inside})" if inside else "")
    share = median / procs if procs else None
    if share is not None:
        said += f": {share:.0%} of {count(procs)} times its speed".replace("%", " %")
    if high is not None and high < 1:
        return said + ". One process is faster here: run without ranks."
    if share is not None and share > MORE_THAN_ALL:
        return (
            said
            + ". Ranks alone cannot explain that: one process does not use this machine well. `flatout tune` without ranks may find out why."
        )
    return said + "."


def remarks(found: RanksRecord) -> list[str]:
    """Return remarks on the communication and on slow ranks."""
    said = []
    if drawable(found.sent_bytes):
        said.append(
            f"Each rank contributes {size(found.sent_bytes)} of gradients to the exchange in each step."
        )
    if found.imbalance:
        said.append(_as_sentence(found.imbalance))
    elif found.paces:
        said.append("The ranks are balanced: none is waited for more than the others.")
    if (found.ratio is not None or not found.paces) and found.why_not:
        said.append(_as_sentence(found.why_not))
    return said


def _as_sentence(text: str) -> str:
    words = sentence(one_line(text))
    return words[:1].upper() + words[1:]


def rows(found: RanksRecord) -> list[tuple[str, str, str, str, str]]:
    """Return a row per rank: name, wait for data, computation, exposed exchange, samples."""
    several_hosts = len({pace.host for pace in found.paces}) > 1
    return [
        (
            _name(pace, several_hosts),
            milliseconds(pace.data_ms),
            milliseconds(pace.compute_ms),
            milliseconds(pace.exchange_ms),
            figure(pace.samples) if drawable(pace.samples) else "",
        )
        for pace in found.paces[:MOST_RANKS]
    ]


def _name(pace: RankPace, several_hosts: bool) -> str:
    return one_line(f"rank {pace.rank}", 40) + (f", {one_line(pace.host, 40)}" if several_hosts else "")


def rank_bars(found: RanksRecord) -> Markup | None:
    """Return a stacked bar per rank on one scale: waiting for data, computing, exchanging."""
    paces = [pace for pace in found.paces[:MOST_RANKS] if total(pace) > 0]
    longest = max(map(total, paces), default=0.0)
    if longest <= 0:
        return None
    several_hosts = len({pace.host for pace in paces}) > 1
    drawn = (
        bar(_name(pace, several_hosts), parts(pace), total(pace), longest, ROW * at)
        for at, pace in enumerate(paces)
    )
    said = "; ".join(
        f"{_name(pace, False)}: " + ", ".join(f"{part.phase} {milliseconds(part.ms)}" for part in parts(pace))
        for pace in paces
    )
    return chart(f"A step of each rank. {said}", ROW * len(paces), list(chain.from_iterable(drawn)))


def parts(pace: RankPace) -> Sequence[PhasePart]:
    known = (
        (name, drawable(ms))
        for name, ms in (("data", pace.data_ms), ("compute", pace.compute_ms), ("exchange", pace.exchange_ms))
    )
    return [PhasePart(name, max(0.0, ms or 0.0), ms, None, None) for name, ms in known]


def total(pace: RankPace) -> float:
    return sum(part.ms for part in parts(pace))
