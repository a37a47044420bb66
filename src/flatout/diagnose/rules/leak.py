"""Memory grows with every step.

What:
    At the same point of each step, the program holds more tensors than a step before, beyond chance.
Why it matters:
    The longer the program trains, the more memory it needs, until it runs out.
How to fix it:
    Keep sums instead of lists. Clear a list at the end of an epoch. Limit the size of a cache.
Example:
  - outputs.append(logits.detach())
  + right += (logits.argmax(1) == target).sum()
"""

from collections.abc import Iterable

from flatout.diagnose.memory_growth import growth_finding
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check(profile: ProfileRecord) -> Iterable[Finding]:
    if (
        profile.tensor_growth is not None
        and profile.tensor_growth.leaking
        and not profile.tensor_growth.graph
    ):
        yield growth_finding(RULE, profile, profile.tensor_growth, "")


RULE = Rule(
    "FL251",
    "leak",
    Severity.MEMORY,
    __doc__,
    check_profile=check,
    sort_before=Severity.TIME,
    replaced_at_its_line_by=("slowing_down",),
)
