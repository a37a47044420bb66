"""Variables for the PROCESS levers of a trial."""

from __future__ import annotations

from flatout.agent.applier import before_start
from flatout.schema.errors import TrialFailed
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.trial.spec import TABLE, levers


def process_environment(plan: Plan, facts: Facts, table: str = TABLE) -> dict[str, str]:
    """Return the variables for the PROCESS levers of a Plan.

    Raises TrialFailed for a lever that does not apply here: the trial would measure another plan.
    """
    variables, outcomes = before_start(levers(table), plan, facts, ask=False)
    for outcome in outcomes:
        choice = outcome.choice
        if not outcome.applied:
            raise TrialFailed(
                f"{choice.name} = {choice.value!r} cannot be applied: {outcome.reason}. Run `flatout tune` again on this machine."
            )
    return variables
