"""Compares several ranks with one process: the speed-up, the losses, and the ranks that others wait for.

One process of the program alternates with its ranks, block by block at the same ticks, so both compute the
same batches. Then all ranks record their own pace for some steps (`flatout.trial.probes.pace`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatout.measure.clock import seconds
from flatout.measure.rank_balance import imbalance, lost_ms, paces
from flatout.measure.statistics import mean
from flatout.schema.enums import Moment, Origin
from flatout.schema.lever import Lever
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio
from flatout.trial.blocks import LeverFailed
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
SHARE = 0.15  # of the budget, for both together
PACE_STEPS = 40
PACE_S = 10.0


def base_plan(division: Mapping[str, Any], shards: bool) -> Plan:
    """Return the plan of every rank: how batches are split, and whether weights are sharded."""
    return Plan((Choice(DIVIDES, dict(division), Origin.USER), *choices(shards)))


def unfit(lever: Lever, base: Plan | None) -> str:
    """Return why a lever cannot be combined with ``base``; empty if it can."""
    if base is None:
        return ""
    if lever.of_one_process:
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
            found.one_process_ms = alone.trial.ready["tick_ms"] if found.ratio is not None else None
            tuning.note(
                f"{found.procs} ranks",
                "processes",
                found.ratio,
                found.why_not,
                start_s,
                against="one process",
            )
            tuning.interleaver.dismiss(alone.trial)
    _listen(tuning)
    tuning.save()


def _compared(tuning: Tuning, alone: RunningCandidate, until_s: float) -> Ratio | None:
    assert tuning.observed is not None
    assert tuning.session.ranks is not None
    try:
        return compared(tuning.interleaver, alone.trial, tuning.observed, until_s)
    except ProgramGone as gone:
        tuning.session.ranks.why_not = f"the ranks could not be compared with one process: {why_gone(gone)}"
        return None


def _listen(tuning: Tuning) -> None:
    found, trial, interleaver = tuning.session.ranks, tuning.observed, tuning.interleaver
    if found is None or trial is None or trial not in interleaver.running or interleaver.unit != "step":
        return
    steps = max(2, min(PACE_STEPS, int(PACE_S * 1000 / max(interleaver.tick_ms, 1e-3))))
    tuning.stage("ranks", "the pace of each rank")
    try:
        answer = trial.listen("pace", interleaver.deadline(steps + 2), everywhere=True, ticks=steps)
    except (ProgramGone, LeverFailed) as error:
        answer = {"why_not": why_gone(error)}
    if "ranks" not in answer or any("why_not" in each for each in answer["ranks"]):
        said = answer.get("why_not") or next(each["why_not"] for each in answer["ranks"] if "why_not" in each)
        found.why_not = found.why_not or f"the pace of the ranks could not be measured: {said}"
        return
    recorded = answer["ranks"]
    found.paces, found.lost_ms, found.imbalance = paces(recorded), lost_ms(recorded), imbalance(recorded)
    found.sent_bytes = mean([sent for each in recorded for sent in each["sent_bytes"]])
