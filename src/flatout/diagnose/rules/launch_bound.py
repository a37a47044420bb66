"""The device waits for the host to launch work.

What:
    The device is idle between its kernels, because the host launches them more slowly than they run.
Why it matters:
    A launch costs the host several microseconds. Shorter kernels leave the device idle, however fast it is.
How to fix it:
    Use larger batches, or run:
    flatout tune --levers compile,fused_ops,fused_optimizer COMMAND...
Example:
  - model = Model().cuda()
  + model = torch.compile(Model().cuda(), mode="reduce-overhead")
"""

from collections.abc import Iterable

from flatout.diagnose.gains import format_ms, share_of_step, speedup_without
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check(profile: ProfileRecord) -> Iterable[Finding]:
    if profile.device == "cpu" or profile.bound != "launch" or not profile.idle_ms:
        return
    gaps = sorted(profile.idle_gaps, key=lambda gap: -gap.ms)
    evidence = [
        f"{gap.host_activity}: {format_ms(gap.ms)} in {gap.calls:.3g} gaps per {profile.unit}"
        for gap in gaps[:5]
    ]
    place = next((gap.place for gap in gaps if gap.place), None)
    yield RULE.profile_finding(
        f"the device waits for the host for {share_of_step(profile, profile.idle_ms)}",
        [place],
        evidence=evidence,
        predicted=speedup_without(profile, profile.idle_ms),
        how="estimate: the device without its gaps",
    )


RULE = Rule(
    "FL165",
    "launch_bound",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("compile", "fused_ops", "fused_optimizer"),
)
