"""The loss is not a number.

What:
    Losses of the steps that were seen are NaN or infinite.
Why it matters:
    The first of them reaches every weight in the next step; from there on nothing is learnt, at full speed.
How to mend it:
    Look at the first one: torch.autograd.set_detect_anomaly(True) for a few steps names the operator. A logarithm or a root of what becomes
    negative wants softplus or clamp; a learning rate that is too large wants to be smaller.
Bad:
    loss = torch.log(prediction).mean()
Good:
    loss = torch.log(torch.nn.functional.softplus(prediction)).mean()
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.diagnose.seen import found, habit
from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    calls, _, places = habit(profile, "loss_not_finite")
    if calls > 0:
        share = f"{100 * min(1.0, calls):.0f} % of the losses are NaN or infinite"
        yield found(RULE, share, places[0] if places else None, others=places[1:])


RULE = Rule("FL050", "not_finite", Severity.WRONG, __doc__ or "", judge=judge)
