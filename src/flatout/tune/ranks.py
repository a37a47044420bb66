"""Compares several ranks with one process.

One process of the program alternates with its ranks, block by block at the same ticks, so both compute the
same batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout.measure.clock import seconds
from flatout.schema.enums import Moment, Origin
from flatout.schema.lever import Lever
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio
from flatout.trial.parent import ProgramGone
from flatout.tune.comparison import compared
from flatout.tune.gone import why_gone
from flatout.tune.interleaver import RunningCandidate
from flatout.tune.rehearsal import LEVER as DIVIDES
from flatout.tune.sharding import LEVER as SHARDING
from flatout.tune.sharding import choices
from flatout.tune.tuning import Tuning

# Levers that act on the model but not on its weights
BESIDE_PARTS = ("autocast", "tf32", "reduced_precision")
OF_LOADERS = "changes how a DataLoader makes batches; with several ranks flatout splits the batches itself"
OF_ONE_PROCESS = (
    "its first steps compile or try algorithms; flatout measures such levers in a single process only"
)
OF_WHOLE_WEIGHTS = "needs whole weights and optimizer state, but each rank keeps only a shard (--shard)"
SHARE = 0.15  # of the budget


def base_plan(division: Mapping[str, Any], shards: bool) -> Plan:
    """Return the plan of every rank: how batches are split, and whether weights are sharded."""
    return Plan((Choice(DIVIDES, dict(division), Origin.USER), *choices(shards)))


def unfit(lever: Lever, base: Plan | None) -> str:
    """Return why a lever cannot be combined with ``base``; empty if it can."""
    if base is None:
        return ""
    if lever.single_process:
        return OF_LOADERS if lever.moment is Moment.LOADER else OF_ONE_PROCESS
    parts = (
        base.get(SHARDING) is not None
        and lever.moment in (Moment.MODEL, Moment.OPTIMIZER)
        and lever.name not in BESIDE_PARTS
    )
    return OF_WHOLE_WEIGHTS if parts else ""


def beside_one_process(tuning: Tuning) -> None:
    """Fill the session's record of the ranks.

    It also says what could not be measured; the search continues.
    """
    found, ranks = tuning.session.ranks, tuning.observed
    if found is None or ranks is None or tuning.alone is None:
        return
    start_s = seconds()
    if tuning.copies < 2:
        found.why_not = "not compared: one process does not fit into memory together with the ranks"
    elif found.ratio is None:
        tuning.stage("ranks", f"{found.procs} ranks against one process")
        try:
            alone = tuning.interleaver.enter(Plan(), 0, 60 + 8 * tuning.start_cost_s, alone=True)
        except ProgramGone as gone:
            found.why_not = f"one process could not be measured together with the ranks: {why_gone(gone)}"
        else:
            found.ratio = _compared(tuning, alone, start_s + SHARE * tuning.budget_s)
            tuning.note(
                f"{found.procs} ranks",
                "processes",
                found.ratio,
                found.why_not,
                start_s,
                against="one process",
            )
            tuning.interleaver.dismiss(alone.trial)
    tuning.save()


def _compared(tuning: Tuning, alone: RunningCandidate, until_s: float) -> Ratio | None:
    assert tuning.observed is not None
    assert tuning.session.ranks is not None
    try:
        return compared(tuning.interleaver, alone.trial, tuning.observed, until_s)
    except ProgramGone as gone:
        tuning.session.ranks.why_not = f"the ranks could not be compared with one process: {why_gone(gone)}"
        return None
