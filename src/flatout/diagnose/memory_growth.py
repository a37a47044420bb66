"""Reports a growth of memory: how much, what holds it, which line allocates it, and when memory runs out."""

from __future__ import annotations

from flatout.diagnose.gains import found
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding
from flatout.schema.profile import MemoryGrowth, ProfileRecord
from flatout.schema.sizes import size


def growing(rule: Rule, profile: ProfileRecord, leak: MemoryGrowth, how: str) -> Finding:
    held = f", held by {leak.holder}" if leak.holder else ""
    said = f"{size(leak.bytes_a_step)} more after each {profile.unit}{held}" + (f", {how}" if how else "")
    evidence = [
        f"the probability of such a trend without a leak is {leak.p_value:.1g}, over {leak.steps or len(leak.series)} steps"
    ]
    if leak.tensors_a_step:
        evidence.append(f"{leak.tensors_a_step:.3g} more tensors are alive after each {profile.unit}")
    free = profile.machine.get("memory_bytes")
    if leak.where == "host" and free and leak.bytes_a_step > 0 and profile.step_ms:
        hours = float(free) / leak.bytes_a_step * profile.step_ms / 3.6e6
        evidence.append(
            f"at this rate it fills the machine's {size(float(free))} in {f'{60 * hours:.0f} minutes' if hours < 2 else f'{hours:.0f} hours'}"
        )
    return found(rule, said, leak.place, evidence=evidence)
