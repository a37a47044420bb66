"""What another machine is asked to measure, and what comes back: JSON both ways.

    look        what machine this is                                      {"facts", "key"}
    together    programs that are started together and take turns         {"seen": what came of each}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.tune.together import Asked
from flatout.tune.tuning import Tuning


def together_order(tuning: Tuning, asked: Sequence[Asked], for_s: float, share: float | None = None) -> dict[str, Any]:
    """``for_s``: how long the programs may take turns, their starts included. ``share``: of the time that starting them takes, after which it is enough."""
    arena = tuning.arena
    return {"kind": "together", "typed": list(tuning.command.typed), "budget_s": tuning.budget_s, "tick_ms": arena.tick_ms, "unit": arena.unit,
            "prefetched_ticks": arena.prefetched_ticks, "longest_ticks": arena.longest_ticks, "patience_s": tuning.patience_s, "seconds": for_s, "share": share,
            "asked": [one.to_json() for one in asked]}
