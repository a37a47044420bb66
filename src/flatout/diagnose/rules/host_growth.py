"""The process grows, and not by its tensors.

What:
    The memory of the process or of its loader workers grows with every step, beyond chance, while its tensors do not.
Why it matters:
    Lists and dictionaries that a data set or a logger fills end as the kernel's out-of-memory killer, hours later and without a traceback.
How to mend it:
    Keep no record of each sample in the data set; hold large tables as one tensor or array, not as Python objects.
Bad:
    def __getitem__(self, i):
        self.given.append(i)
        return self.x[i]
Good:
    def __getitem__(self, i):
        return self.x[i]
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.growth import growing
from flatout.diagnose.rule import Rule
from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord

LEAST_BYTES = 2**20  # a step; recording the steps takes some hundred KB of each by itself


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    grows, tensors = profile.host_growth, profile.leak
    if grows is not None and grows.leaking and grows.bytes_a_step >= LEAST_BYTES and not (tensors is not None and tensors.leaking):
        yield growing(RULE, profile, grows, "")


RULE = Rule("FL252", "host_growth", Severity.MEMORY, __doc__ or "", judge=judge)
