"""The loss is NaN or infinite.

What:
    The loss is NaN or infinite in some of the recorded steps.
Why it matters:
    The first such loss reaches every weight in the next step. From then on, training continues at full speed
    but learns nothing.
How to fix it:
    Look at the first one: torch.autograd.set_detect_anomaly(True) for a few steps names the operator. A
    logarithm or root of a value that becomes negative needs softplus or clamp. If the learning rate is too
    large, reduce it.
Example:
  - loss = torch.log(prediction).mean()
  + loss = torch.log(torch.nn.functional.softplus(prediction)).mean()
"""

from collections.abc import Iterable

from flatout.diagnose.gains import event_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check(profile: ProfileRecord) -> Iterable[Finding]:
    calls, _, places = event_of(profile, "loss_not_finite")
    if calls > 0:
        share = f"{100 * min(1.0, calls):.0f} % of the losses are NaN or infinite"
        yield RULE.profile_finding(share, places)


RULE = Rule("FL050", "not_finite", Severity.WRONG, __doc__, check_profile=check)
