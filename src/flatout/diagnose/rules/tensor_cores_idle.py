"""The Tensor Cores are idle.

What:
    The device has Tensor Cores, and matrix products or convolutions take much of its time, but none of them
    uses the Tensor Cores.
Why it matters:
    Tensor Cores multiply matrices several times as fast. TF32 keeps the range of float32, and bf16 uses half
    its bytes.
How to fix it:
    Use torch.set_float32_matmul_precision("high") or torch.autocast("cuda", torch.bfloat16). To measure and
    guard the change, run:
    flatout tune --levers tf32,autocast COMMAND...
Example:
  - loss = criterion(model(x), y)
  + with torch.autocast("cuda", torch.bfloat16):
  +     loss = criterion(model(x), y)
"""

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

MUCH = 0.1  # of the operators' time


def check(profile: ProfileRecord) -> Iterable[Finding]:
    able = sorted((o for o in profile.operations if o.tensor_cores is not None), key=lambda o: -o.share)
    idle = [o for o in able if not o.tensor_cores]
    share = sum(o.share for o in idle)
    if not idle or any(o.tensor_cores for o in able) or share < MUCH:
        return
    yield RULE.profile_finding(
        f"operators that could use Tensor Cores take {100 * share:.0f} % of the device's time, but none of them does",
        [idle[0].place],
        evidence=[f"{o.name} {', '.join(o.dtypes)}: {100 * o.share:.0f} %" for o in idle[:4]],
    )


RULE = Rule(
    "FL164",
    "tensor_cores_idle",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("tf32", "autocast"),
)
