"""Measures levers that you name and the tuner never selects, because they change training.

It records the speed and both loss curves. Both programs start from the same seed and alternate block by
block, so speed and losses come from the same steps.
"""

from flatout.measure.clock import seconds
from flatout.schema.plan import Plan
from flatout.schema.session import NamedLeverRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.comparison import compare_running
from flatout.tune.endings import end_reason
from flatout.tune.interleaver import RunningCandidate
from flatout.tune.tuning import Tuning

BUDGET_SHARE = 0.4  # of the budget, for all of them
SEED = 0


def measure_named(tuning: Tuning) -> None:
    """Fill ``session.named``. A lever that fails gets a sentence there, and the search continues."""
    measured_plans = {record.plan for record in tuning.session.named_levers}
    pending = [choice for choice in tuning.goal.named if choice.text not in measured_plans]
    for choice in pending:
        plan, start_s = Plan((choice,)), seconds()
        record = NamedLeverRecord(plan.describe())
        tuning.stage("by name", f"{record.plan} against the plain program")
        candidates: list[RunningCandidate] = []
        try:
            for side_plan in (Plan(), plan):
                candidates.append(tuning.start_paused(side_plan, SEED))
            plain, named = (candidate.trial for candidate in candidates)
            until_s = seconds() + max(
                BUDGET_SHARE * tuning.budget_s / len(pending) - (seconds() - start_s),
                4 * tuning.interleaver.block_s,
            )
            record.ratio = compare_running(tuning.interleaver, plain, named, until_s)
            records = plain.finish(), named.finish()
            record.plain_losses, record.losses = (
                [float.fromhex(loss) for loss in record.losses] for record in records
            )
        except (ProgramGone, LeverFailed) as error:
            record.why_not = end_reason(error)
        finally:
            for candidate in candidates:
                tuning.interleaver.dismiss(candidate.trial)
        tuning.session.named_levers.append(record)
        tuning.record_comparison(record.plan, "by name", record.ratio, record.why_not, start_s)
