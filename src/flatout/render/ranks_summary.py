"""The ranks of a session: their speed-up over one process."""

from flatout.render.formatting import count, factor, finite, interval, plural, sentence
from flatout.render.page import Paragraph, Section
from flatout.schema.session import RanksRecord

MORE_THAN_ALL = 1.1  # a share of ideal scaling above this is implausible


def ranks_section(ranks: RanksRecord | None) -> list[Section]:
    """Return the section of a program with ranks, else nothing."""
    if ranks is None:
        return []
    return [Section("Ranks compared with one process", [Paragraph(speed_sentence(ranks), "verdict")])]


def speed_sentence(ranks: RanksRecord) -> str:
    """Return the speed-up over one process in a sentence."""
    who, ratio = plural(ranks.procs, "rank"), ranks.ratio
    median = finite(ratio.median) if ratio is not None else None
    if ratio is None or median is None:
        return sentence(f"{who}; {ranks.why_not}") if ranks.why_not else f"{who}."
    inside, procs, high = interval(ratio.low, ratio.high), finite(ranks.procs), finite(ratio.high)
    text = f"{who} are {factor(median)[:-1]} factor as fast as one process" + (
        f" ({inside})" if inside else ""
    )
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
