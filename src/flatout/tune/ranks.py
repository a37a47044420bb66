"""Compares several ranks with one process.

One process of the program alternates with its ranks, block by block at the same ticks, so both compute the
same batches.
"""

from collections.abc import Mapping
from typing import Any

from flatout.measure.clock import seconds
from flatout.schema.enums import Moment, Origin
from flatout.schema.lever import Lever
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio
from flatout.trial.parent import ProgramGone
from flatout.tune.comparison import compare_running
from flatout.tune.endings import end_reason
from flatout.tune.interleaver import RunningCandidate
from flatout.tune.rehearsal import LEVER as DATA_PARALLEL
from flatout.tune.sharding import LEVER as SHARDING
from flatout.tune.sharding import choices
from flatout.tune.tuning import Tuning

# Levers that act on the model but not on its weights
SHARD_SAFE_LEVERS = ("autocast", "tf32", "reduced_precision")
LOADERS_SPLIT = "changes how a DataLoader makes batches; with several ranks flatout splits the batches itself"
SINGLE_PROCESS_ONLY = (
    "its first steps compile or try algorithms; flatout measures such levers in a single process only"
)
NEEDS_WHOLE_WEIGHTS = "needs whole weights and optimizer state, but each rank keeps only a shard (--shard)"
BUDGET_SHARE = 0.15  # of the budget


def base_plan(division: Mapping[str, Any], shards: bool) -> Plan:
    """The plan of every rank: how batches are split, and whether weights are sharded."""
    return Plan((Choice(DATA_PARALLEL, dict(division), Origin.USER), *choices(shards)))


def why_incompatible(lever: Lever, base: Plan | None) -> str:
    """Why a lever cannot be combined with ``base``; empty if it can."""
    if base is None:
        return ""
    if lever.single_process:
        return LOADERS_SPLIT if lever.moment is Moment.LOADER else SINGLE_PROCESS_ONLY
    sharded = (
        base.get(SHARDING) is not None
        and lever.moment in (Moment.MODEL, Moment.OPTIMIZER)
        and lever.name not in SHARD_SAFE_LEVERS
    )
    return NEEDS_WHOLE_WEIGHTS if sharded else ""


def compare_with_one_process(tuning: Tuning) -> None:
    """Fill the session's record of the ranks.

    It also says what could not be measured; the search continues.
    """
    record, ranks = tuning.session.ranks, tuning.plain_trial
    if record is None or ranks is None or tuning.single_command is None:
        return
    start_s = seconds()
    if tuning.max_copies < 2:
        record.why_not = "not compared: one process does not fit into memory together with the ranks"
    elif record.ratio is None:
        tuning.stage("ranks", f"{record.procs} ranks against one process")
        try:
            timeout_s = 60 + 8 * tuning.start_cost_s
            one_process = tuning.interleaver.start_paused(Plan(), 0, timeout_s, as_one_process=True)
        except ProgramGone as gone:
            record.why_not = f"one process could not be measured together with the ranks: {end_reason(gone)}"
        else:
            record.ratio = _compare(tuning, one_process, start_s + BUDGET_SHARE * tuning.budget_s)
            tuning.record_comparison(
                f"{record.procs} ranks",
                "processes",
                record.ratio,
                record.why_not,
                start_s,
                against="one process",
            )
            tuning.interleaver.dismiss(one_process.trial)
    tuning.save()


def _compare(tuning: Tuning, one_process: RunningCandidate, until_s: float) -> Ratio | None:
    assert tuning.plain_trial is not None
    assert tuning.session.ranks is not None
    try:
        return compare_running(tuning.interleaver, one_process.trial, tuning.plain_trial, until_s)
    except ProgramGone as gone:
        tuning.session.ranks.why_not = f"the ranks could not be compared with one process: {end_reason(gone)}"
        return None
