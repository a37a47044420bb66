"""Batch normalisation runs on very few samples.

What:
    The model has batch normalisation, and a forward pass has four samples or fewer.
Why it matters:
    The mean and variance of so few values are mostly noise. Training is unstable, and the running statistics
    used in evaluation fit neither.
How to fix it:
    Use torch.nn.GroupNorm(32, channels), a larger micro-batch, or SyncBatchNorm across ranks.
Example:
  - model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
  + model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    loader = DataLoader(data, batch_size=2)
"""

import re
from collections.abc import Iterable

from flatout.diagnose.gains import event_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

FEW = 4


def check(profile: ProfileRecord) -> Iterable[Finding]:
    layers = sum(
        count
        for name, count in (profile.settings.get("modules") or {}).items()
        if name.startswith("BatchNorm")
    )
    samples = min(_samples(profile), default=None)
    if not layers or samples is None or samples > FEW:
        return
    _, _, places = event_of(profile, "forward")
    yield RULE.profile_finding(
        f"{layers} batch normalisation layers receive {samples} samples at a time",
        places[:1],
    )


def _samples(profile: ProfileRecord) -> Iterable[int]:
    """Yield the first axis of each normalised tensor, from the operator shapes: ``(2, 512) x (512,)``."""
    for operation in profile.operations:
        if "batch_norm" in operation.name and "backward" not in operation.name:
            for shape in operation.shapes:
                first = re.match(r"\((\d+),", shape)
                if first:
                    yield int(first[1])


RULE = Rule("FL350", "tiny_batch_norm", Severity.FRAGILE, __doc__, check_profile=check)
