"""The model is recompiled repeatedly.

What:
    torch.compile has created new graphs for a function that was already compiled. A value that it assumed
    constant has changed: a shape, a number, or an attribute of a module.
Why it matters:
    Each compilation takes seconds to minutes. After eight of them, torch stops compiling the function and
    runs it uncompiled.
How to fix it:
    Use torch.compile(model, dynamic=True), or torch._dynamo.mark_dynamic(tensor, 0) for the axis that
    changes. Or pad to a few lengths.
Example:
  - model = torch.compile(model, dynamic=False)
  + model = torch.compile(model, dynamic=True)
"""

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

A_FEW = 2  # the first change of a size makes it dynamic, as intended


def check(profile: ProfileRecord) -> Iterable[Finding]:
    seen = profile.compile_record
    if seen is None or seen.recompiles <= A_FEW:
        return
    yield RULE.profile_finding(
        f"{seen.recompiles} recompilations so far; compiling took {seen.ms / 1000:.1f} s",
        seen.places,
        evidence=seen.reasons[:4],
    )


RULE = Rule("FL155", "recompiles", Severity.TIME, __doc__, check_profile=check)
