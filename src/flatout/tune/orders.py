"""The orders that a search sends to another machine, and the answers: JSON both ways.

look        describe this machine                                  {"facts", "key"}
together    start these programs together and interleave them      {"seen": the result of each}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.tune.comparison import ProgramRequest
from flatout.tune.tuning import Tuning


def together_order(
    tuning: Tuning, asked: Sequence[ProgramRequest], for_s: float, share: float | None = None
) -> dict[str, Any]:
    """Build an order to measure programs together.

    ``for_s``: time limit, including the starts. ``share``: measuring may end after this share of the time of
    the starts.
    """
    interleaver = tuning.interleaver
    return {
        "kind": "together",
        "typed": list(tuning.command.typed),
        "budget_s": tuning.budget_s,
        "tick_ms": interleaver.tick_ms,
        "unit": interleaver.unit,
        "prefetched_ticks": interleaver.prefetched_ticks,
        "longest_ticks": interleaver.longest_ticks,
        "timeout_s": tuning.timeout_s,
        "seconds": for_s,
        "share": share,
        "asked": [one.to_json() for one in asked],
    }
