"""The ranks of a session: their speed-up over one process."""

from __future__ import annotations

from flatout.render.formatting import count, factor, finite, interval, plural, sentence
from flatout.render.page import Paragraph, Section
from flatout.schema.session import RanksRecord

MAX_SHARE_OF_IDEAL = 1.1  # a share of ideal scaling above this is implausible


def ranks_section(ranks: RanksRecord | None) -> list[Section]:
    """Return the section of a program with ranks, else nothing."""
    if ranks is None:
        return []
    return [Section("Ranks compared with one process", [Paragraph(speed_sentence(ranks), "verdict")])]


def speed_sentence(ranks: RanksRecord) -> str:
    """Return the speed-up over one process in a sentence."""
    ranks_text, ratio = plural(ranks.procs, "rank"), ranks.ratio
    median = finite(ratio.median) if ratio is not None else None
    if ratio is None or median is None:
        return sentence(f"{ranks_text}; {ranks.why_not}") if ranks.why_not else f"{ranks_text}."
    interval_text, procs, high = interval(ratio.low, ratio.high), finite(ranks.procs), finite(ratio.high)
    text = f"{ranks_text} are {factor(median)[:-1]} times as fast as one process" + (
        f" ({interval_text})" if interval_text else ""
    )
    share = median / procs if procs else 0.0
    if share:
        text += f": {100 * share:.0f} % of {count(procs)} times its speed"
    if high is not None and high < 1:
        return text + ". One process is faster here: run without ranks."
    if share > MAX_SHARE_OF_IDEAL:
        return (
            text
            + ". Ranks alone cannot explain that: one process does not use this machine well. `flatout tune` without ranks may find out why."
        )
    return text + "."
