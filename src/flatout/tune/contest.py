"""Contests that are held where an order says (``tune.orders``): everything that is compared in one runs on one machine, in turns."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from flatout.launch.command import understand
from flatout.measure.clock import seconds
from flatout.plan.errors import FlatoutError
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.plan import Plan
from flatout.plan.records import Ratio, SessionRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.arena import Entrant
from flatout.tune.confirm import pair_here
from flatout.tune.session import key_of
from flatout.tune.tuning import Goal, Tuning, why_gone

LOST_HERE = "the plain program beside it came to its end first"


def hold(order: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Hold the contest of this order on this machine, whose facts these are. Raises FlatoutError where the program or its script is not there."""
    command = understand(order["typed"])
    if order["kind"] == "look":
        return {"facts": facts.to_json(), "key": key_of(command, facts)}
    with tempfile.TemporaryDirectory(prefix="flatout-contest-") as folder:
        tuning = Tuning(command, JobFolder(Path(folder)).make(), facts, SessionRecord(list(command.shown), folder, {}), Goal(order["budget_s"]))
        arena = tuning.arena
        arena.tick_ms, arena.unit, arena.prefetched_ticks = order["tick_ms"], order["unit"], order["prefetched_ticks"]
        tuning.start_cost_s, tuning.longest_pair_s, tuning.copies = order["start_cost_s"], order["longest_pair_s"], order["copies"]
        try:
            return _race(tuning, order) if order["kind"] == "race" else _pair(tuning, order)
        finally:
            arena.close()


def _race(tuning: Tuning, order: dict[str, Any]) -> dict[str, Any]:
    verdicts: list[Ratio | str] = [LOST_HERE] * len(order["plans"])
    entrants: dict[int, Entrant] = {}
    for at, plan in enumerate(order["plans"]):
        try:
            entrants[at] = tuning.enter(Plan.from_json(plan), patience_s=60 + 4 * tuning.start_cost_s)
        except (ProgramGone, LeverFailed) as error:
            verdicts[at] = why_gone(error)
    try:
        plain = tuning.enter(Plan()).trial if entrants else None
    except ProgramGone as gone:
        raise FlatoutError(f"the plain program does not run there: {why_gone(gone)}") from None
    if plain is not None:
        found = tuning.arena.processes(plain, list(entrants.values()), seconds() + order["seconds"])
        for place, at in enumerate(entrants):
            verdicts[at] = found.get(place, LOST_HERE)
    return {"verdicts": [verdict if isinstance(verdict, str) else verdict.to_json() for verdict in verdicts]}


def _pair(tuning: Tuning, order: dict[str, Any]) -> dict[str, Any]:
    try:
        rounds, plain, tuned = pair_here(tuning, Plan.from_json(order["plan"]), order["seed"], order["draws"])
    except ProgramGone as gone:
        return {"gone": gone.record.to_json()}
    except LeverFailed as error:
        return {"left_out": [error.name, error.reason]}
    return {"rounds": [[each.a_ms, each.b_ms] for each in rounds], "plain": plain.to_json(), "tuned": tuned.to_json()}
