"""A debugging aid is left enabled.

What:
    A training program enables `torch.autograd.set_detect_anomaly(True)`, `emit_nvtx`, `gradcheck` or
    `torch.autograd.profiler.profile` unconditionally.
Why it matters:
    Anomaly detection records a Python stack for every operation and checks every gradient for NaN. Steps take
    several times as long. The other aids slow down every operation too.
How to fix it:
    Remove it, or make it optional. The lever `debug_off` disables it for a run.
Example:
  + import sys
  +
    import torch

  - torch.autograd.set_detect_anomaly(True)  # <-
  + torch.autograd.set_detect_anomaly("--debug" in sys.argv)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#disable-debugging-apis
"""

from collections.abc import Iterable

from flatout.diagnose.gains import event_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    if not profile.settings.get("anomaly"):
        return
    _, _, places = event_of(profile, "anomaly")
    yield RULE.profile_finding("anomaly detection is enabled in every step", places)


RULE = Rule(
    "FL112",
    "debugging_left_on",
    Severity.TIME,
    __doc__,
    check_profile=check_profile,
    levers=("debug_off",),
)
