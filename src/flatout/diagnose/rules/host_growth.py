"""The memory of the process grows, but not through tensors.

What:
    The memory of the process or its loader workers grows with every step, beyond chance, while its tensors do
    not grow.
Why it matters:
    If a data set or logger keeps adding to lists and dictionaries, the kernel's out-of-memory killer ends the
    program. That happens hours later, and without a traceback.
How to fix it:
    Keep no per-sample records in the data set. Store large tables as one tensor or array, not as Python
    objects.
Example:
    def __getitem__(self, i):
  -     self.given.append(i)
        return self.x[i]
"""

from collections.abc import Iterable

from flatout.diagnose.memory_growth import growth_finding
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

LEAST_BYTES = 2**20  # per step; recording alone takes a few hundred KB per step


def check(profile: ProfileRecord) -> Iterable[Finding]:
    grows, tensors = profile.host_growth, profile.tensor_growth
    if (
        grows is not None
        and grows.leaking
        and grows.bytes_a_step >= LEAST_BYTES
        and not (tensors is not None and tensors.leaking)
    ):
        yield growth_finding(RULE, profile, grows, "")


RULE = Rule(
    "FL252",
    "host_growth",
    Severity.MEMORY,
    __doc__,
    check_profile=check,
    sort_before=Severity.TIME,
    replaced_by=("leak", "loss_kept_with_graph", "slowing_down", "recompiles"),
)
