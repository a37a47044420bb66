"""Gradients are filled with zeros instead of being set to None.

What:
    The steps call zero_grad(set_to_none=False).
Why it matters:
    Every gradient is written once with zeros, then read and written again to add the new gradient. With None,
    the new gradient is stored directly. Zeroed gradients also keep their memory during the forward pass.
How to fix it:
    Call optimizer.zero_grad(), which sets gradients to None since torch 2.0.
Example:
  - optimizer.zero_grad(set_to_none=False)
  + optimizer.zero_grad()
"""

from collections.abc import Iterable

from flatout.diagnose.gains import HOW_BY_TIME, event_of, share_of_step, speedup_without
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

EACH = 0.2  # minimum share of the steps


def check(profile: ProfileRecord) -> Iterable[Finding]:
    calls, ms, places = event_of(profile, "zero_grad_to_zero")
    if calls >= EACH:
        yield RULE.profile_finding(
            f"filling gradients with zeros takes {share_of_step(profile, ms)}",
            places,
            predicted=speedup_without(profile, ms),
            how=HOW_BY_TIME,
        )


RULE = Rule("FL174", "gradients_zeroed", Severity.TIME, __doc__, check_profile=check)
