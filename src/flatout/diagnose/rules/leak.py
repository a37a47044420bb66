"""Memory grows with every step.

What:
    At the same point of each step more tensors are held than a step before, beyond chance.
Why it matters:
    The program needs more memory the longer it trains, until there is no more.
How to mend it:
    Keep sums in place of lists; clear the list at the end of an epoch; give a cache a limit.
Bad:
    outputs.append(logits.detach())
Good:
    right += (logits.argmax(1) == target).sum()
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.growth import growing
from flatout.diagnose.rule import Rule
from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    if profile.leak is not None and profile.leak.leaking and not profile.leak.graph:
        yield growing(RULE, profile, profile.leak, "")


RULE = Rule("FL251", "leak", Severity.MEMORY, __doc__ or "", judge=judge)
