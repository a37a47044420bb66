"""Orders for contests, and what comes back: JSON both ways.

    look    what machine this is                                     {"facts", "key"}
    race    programs in turns with a plain one                       {"verdicts": one for each plan, a ratio or a sentence}
    pair    a plain program and one under a plan, fresh              {"rounds", "plain", "tuned"}, or "gone" or "left_out" where one of them failed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.measure.statistics import Round
from flatout.plan.plan import Plan
from flatout.plan.records import Ratio, TrialRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.tuning import Tuning


def race_order(tuning: Tuning, plans: Sequence[Plan], for_s: float) -> dict[str, Any]:
    return {"kind": "race", **_circumstances(tuning), "plans": [plan.to_json() for plan in plans], "seconds": for_s}


def pair_order(tuning: Tuning, plan: Plan, seed: int, draws: bool) -> dict[str, Any]:
    return {"kind": "pair", **_circumstances(tuning), "plan": plan.to_json(), "seed": seed, "draws": draws}


def _circumstances(tuning: Tuning) -> dict[str, Any]:
    """What a search has learned of the program, and a contest has to know."""
    arena = tuning.arena
    return {"typed": list(tuning.command.typed), "budget_s": tuning.goal.budget_s, "tick_ms": arena.tick_ms, "unit": arena.unit,
            "prefetched_ticks": arena.prefetched_ticks, "start_cost_s": tuning.start_cost_s, "longest_pair_s": tuning.longest_pair_s, "copies": tuning.copies}


def verdicts_in(answer: dict[str, Any]) -> dict[int, Ratio | str]:
    return {at: verdict if isinstance(verdict, str) else Ratio.from_json(verdict) for at, verdict in enumerate(answer["verdicts"])}


def pair_in(answer: dict[str, Any]) -> tuple[list[Round], TrialRecord, TrialRecord]:
    """Raises ProgramGone or LeverFailed, as a pair that is run here does."""
    if "gone" in answer:
        raise ProgramGone(TrialRecord.from_json(answer["gone"]))
    if "left_out" in answer:
        raise LeverFailed(*answer["left_out"])
    rounds: Sequence[Sequence[float]] = answer["rounds"]
    return [Round(a, b) for a, b in rounds], TrialRecord.from_json(answer["plain"]), TrialRecord.from_json(answer["tuned"])
