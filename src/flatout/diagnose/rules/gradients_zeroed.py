"""Gradients are filled with zeros instead of being dropped.

What:
    zero_grad(set_to_none=False) is called in the steps.
Why it matters:
    Every gradient is written once for the zeros and read and written once more as the new one is added to them; dropped, the new one just takes its
    place. The memory of the gradients is held through the forward pass, too.
How to mend it:
    optimizer.zero_grad(), which drops them since torch 2.0
Bad:
    optimizer.zero_grad(set_to_none=False)
Good:
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.diagnose.seen import TIMED, found, habit, of_step, without
from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord

EACH = 0.2  # of the steps, at least


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    calls, ms, places = habit(profile, "zero_grad_to_zero")
    if calls >= EACH:
        yield found(RULE, f"filling gradients with zeros takes {of_step(profile, ms)}", places[0] if places else None, predicted=without(profile, ms),
                    how=TIMED, others=places[1:])


RULE = Rule("FL174", "gradients_zeroed", Severity.TIME, __doc__ or "", judge=judge)
