"""Convolutions run without the library that is made for them.

What:
    Convolutions took PyTorch's own kernels (slow_conv, thnn) in place of oneDNN's or cuDNN's.
Why it matters:
    These kernels copy the input once for each element of the filter, and multiply then. They take several times as
    long.
How to fix it:
    Use float32 or bfloat16 in place of float64. Leave `torch.backends.mkldnn` and `torch.backends.cudnn` enabled.
Example:
  - model = Net().double()
  + model = Net()
"""

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

MUCH = 0.05  # of the operators' time


def check(profile: ProfileRecord) -> Iterable[Finding]:
    slow = sorted(
        (o for o in profile.operations if "slow_conv" in o.name or "thnn_conv" in o.name),
        key=lambda o: -o.share,
    )
    share = sum(o.share for o in slow)
    if share >= MUCH:
        off = "; mkldnn is off" if profile.settings.get("mkldnn") is False else ""
        yield RULE.profile_finding(
            f"convolutions on the slow path take {100 * share:.0f} % of the operators' time "
            f"({', '.join(slow[0].dtypes)}{off})",
            [next((o.place for o in slow if o.place), None)],
            evidence=[
                f"{o.name}: {o.calls:.3g} calls per {profile.unit}, {100 * o.share:.0f} %" for o in slow
            ],
        )


RULE = Rule("FL173", "slow_convolution", Severity.TIME, __doc__, check_profile=check)
