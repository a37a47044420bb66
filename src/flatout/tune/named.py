"""Measures levers that you name and the tuner never selects, because they change training.

It records the speed and both loss curves. Both programs start from the same seed and alternate block by
block, so speed and losses come from the same steps. The plan is not affected.
"""

from __future__ import annotations

from flatout.measure.clock import seconds
from flatout.schema.plan import Plan, spell
from flatout.schema.session import NamedLeverRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.comparison import compared
from flatout.tune.gone import why_gone
from flatout.tune.interleaver import RunningCandidate
from flatout.tune.tuning import Tuning

SHARE = 0.4  # of the budget, for all of them
SEED = 0


def by_name(tuning: Tuning) -> None:
    """Fill ``session.named``. A lever that fails gets a sentence there, and the search continues."""
    known = {each.plan for each in tuning.session.named_levers}
    todo = [choice for choice in tuning.goal.named if spell(choice.name, choice.value) not in known]
    for choice in todo:
        plan, start_s = Plan((choice,)), seconds()
        found = NamedLeverRecord(plan.describe())
        tuning.stage("by name", f"{found.plan} against the plain program")
        candidates: list[RunningCandidate] = []
        try:
            for each in (Plan(), plan):
                candidates.append(tuning.enter(each, SEED))
            plain, named = (candidate.trial for candidate in candidates)
            until_s = seconds() + max(
                SHARE * tuning.budget_s / len(todo) - (seconds() - start_s), 4 * tuning.interleaver.block_s
            )
            found.ratio = compared(tuning.interleaver, plain, named, until_s)
            records = plain.finish(), named.finish()
            found.plain_losses, found.losses = (
                [float.fromhex(loss) for loss in record.losses] for record in records
            )
        except (ProgramGone, LeverFailed) as error:
            found.why_not = why_gone(error)
        finally:
            for candidate in candidates:
                tuning.interleaver.dismiss(candidate.trial)
        tuning.session.named_levers.append(found)
        tuning.note(found.plan, "by name", found.ratio, found.why_not, start_s)
