"""The ranks of a session: their speed-up over one process, and what each of them does in a step."""

from __future__ import annotations

from flatout.render.formatting import (
    capital,
    count,
    drawable,
    figure,
    interval,
    milliseconds,
    sentence,
    several,
    size,
    times,
)
from flatout.render.page import PagePart, Section, Table, Words
from flatout.schema.session import RanksRecord

MOST_RANKS = 32  # shown; the rest is in session.json
MORE_THAN_ALL = 1.1  # a share of ideal scaling above this is implausible
COLUMNS = ("rank", ">waits for data", ">computes", ">exchange", ">samples")


def ranks_section(ranks: RanksRecord | None) -> list[Section]:
    """Return the section of a program with ranks, else nothing."""
    if ranks is None:
        return []
    paces = ranks.paces[:MOST_RANKS]
    hosts = len({pace.host for pace in ranks.paces}) > 1
    names = [f"rank {pace.rank}" + (f", {pace.host}" if hosts else "") for pace in paces]
    rows = [
        (name, *map(milliseconds, (pace.data_ms, pace.compute_ms, pace.exchange_ms)), figure(pace.samples))
        for name, pace in zip(names, paces, strict=True)
    ]
    note = "Medians. The exchange is the part that the backward pass did not hide; in it, all ranks wait for the slowest."
    parts: list[PagePart] = [Words(speed_sentence(ranks), "verdict")]
    parts += [Table(COLUMNS, rows), Words(note if rows else "", "note"), *map(Words, remarks(ranks))]
    return [Section("Ranks compared with one process", parts)]


def speed_sentence(ranks: RanksRecord) -> str:
    """Return the speed-up over one process in a sentence."""
    who, ratio = several(ranks.procs, "rank"), ranks.ratio
    median = drawable(ratio.median) if ratio is not None else None
    if ratio is None or median is None:
        return sentence(f"{who}; {ranks.why_not}") if ranks.why_not else f"{who}."
    inside, procs, high = interval(ratio.low, ratio.high), drawable(ranks.procs), drawable(ratio.high)
    text = f"{who} are {times(median)[:-1]} times as fast as one process" + (f" ({inside})" if inside else "")
    share = median / procs if procs else 0.0
    if share:
        text += f": {100 * share:.0f} % of {count(procs)} times its speed"
    if high is not None and high < 1:
        return text + ". One process is faster here: run without ranks."
    if share > MORE_THAN_ALL:
        return (
            text
            + ". Ranks alone cannot explain that: one process does not use this machine well. `flatout tune` without ranks may find out why."
        )
    return text + "."


def remarks(ranks: RanksRecord) -> list[str]:
    """Return remarks on the communication and on slow ranks."""
    found = []
    if drawable(ranks.sent_bytes):
        found.append(
            f"Each rank contributes {size(ranks.sent_bytes)} of gradients to the exchange in each step."
        )
    if ranks.imbalance:
        found.append(_as_sentence(ranks.imbalance))
    elif ranks.paces:
        found.append("The ranks are balanced: none is waited for more than the others.")
    if (ranks.ratio is not None or not ranks.paces) and ranks.why_not:
        found.append(_as_sentence(ranks.why_not))
    return found


def _as_sentence(text: str) -> str:
    return capital(sentence(text))
