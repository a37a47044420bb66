"""Measures on this machine what a search on another machine orders (`flatout.tune.orders`)."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from flatout.launch.command import understand
from flatout.measure.clock import seconds
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.tune.arena import Arena
from flatout.tune.session import key_of
from flatout.tune.together import Asked, measure_together


def hold(order: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Carry out this order. Raises FlatoutError if the program or its script is not on this machine."""
    command = understand(order["typed"])
    if order["kind"] == "look":
        return {"facts": facts.to_json(), "key": key_of(command, facts)}
    with tempfile.TemporaryDirectory(prefix="flatout-remote-") as folder:
        arena = Arena(command, JobFolder(Path(folder)).make(), facts)
        arena.tick_ms, arena.unit = order["tick_ms"], order["unit"]
        arena.prefetched_ticks, arena.longest_ticks = order["prefetched_ticks"], order["longest_ticks"]
        asked = [Asked.from_json(one) for one in order["asked"]]
        share = math.inf if order["share"] is None else order["share"]
        try:
            return {"seen": [seen.to_json() for seen in measure_together(arena, asked, seconds() + order["seconds"], order["patience_s"], share=share)]}
        finally:
            arena.close()
