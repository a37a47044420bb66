"""The peak is close to the memory limit of the device.

What:
    The peak of the step exceeds nine tenths of the device's memory. The cheapest solution depends on what
    fills the peak.
Why it matters:
    A longer sequence, another process on the device or a little fragmentation ends the program.
How to fix it:
    If activations fill it: autocast, smaller micro-batches, or activation checkpointing. If the optimizer
    state fills it: a fused or 8-bit optimizer, or sharding. Or run:
    flatout tune --levers autocast,allocator COMMAND...
Example:
  - loader = DataLoader(data, batch_size=512)
  + with torch.autocast("cuda", torch.bfloat16):
  +     loss = criterion(model(x), y)
"""

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord
from flatout.schema.sizes import size

CLOSE = 0.9  # same threshold as PyTorch's TensorBoard plugin


def check(profile: ProfileRecord) -> Iterable[Finding]:
    memory = profile.memory
    total = profile.ceilings.get("memory_bytes") or next(
        (g.get("memory_bytes") for g in profile.machine.get("gpus") or () if isinstance(g, dict)), None
    )
    if memory is None or memory.where != "device" or not total or memory.peak_bytes < CLOSE * total:
        return
    parts = sorted(memory.at_peak.items(), key=lambda part: -part[1])
    evidence = [
        f"{kind}: {size(amount)}, {100 * amount / max(1, memory.peak_bytes):.0f} % of the peak"
        for kind, amount in parts[:4]
    ]
    evidence += [
        f"activations of {name}: {size(amount)}"
        for name, amount in sorted(memory.by_module.items(), key=lambda part: -part[1])[:3]
    ]
    yield RULE.profile_finding(
        f"the peak is {size(memory.peak_bytes)} of {size(total)}", [memory.peak_place], evidence=evidence
    )


RULE = Rule(
    "FL255",
    "memory_limit",
    Severity.MEMORY,
    __doc__,
    check_profile=check,
    levers=("autocast", "allocator"),
)
