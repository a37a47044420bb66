"""Measures on this machine what a search on another machine orders (`flatout.tune.orders`)."""

from __future__ import annotations

import math
from typing import Any

from flatout.job.folder import JobFolder
from flatout.job.temporary import temporary_folder
from flatout.launch.command import understand
from flatout.measure.clock import seconds
from flatout.schema.facts import Facts
from flatout.tune.comparison import ProgramRequest, measure_together
from flatout.tune.interleaver import Interleaver
from flatout.tune.plan_files import key_of


def hold(order: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Carry out this order. Raises FlatoutError if the program or its script is not on this machine."""
    command = understand(order["typed"])
    if order["kind"] == "look":
        return {"facts": facts.to_json(), "key": key_of(command, facts)}
    with temporary_folder("remote") as folder:
        interleaver = Interleaver(command, JobFolder(folder).make(), facts)
        interleaver.tick_ms, interleaver.unit = order["tick_ms"], order["unit"]
        interleaver.prefetched_ticks, interleaver.longest_ticks = (
            order["prefetched_ticks"],
            order["longest_ticks"],
        )
        asked = [ProgramRequest.from_json(one) for one in order["asked"]]
        share = math.inf if order["share"] is None else order["share"]
        try:
            return {
                "seen": [
                    seen.to_json()
                    for seen in measure_together(
                        interleaver, asked, seconds() + order["seconds"], order["timeout_s"], share=share
                    )
                ]
            }
        finally:
            interleaver.close()
