"""Reports a growth of memory: how much, what holds it, which line allocates it, and when memory runs out."""

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding
from flatout.schema.profile import MemoryGrowth, ProfileRecord
from flatout.schema.sizes import size


def growth_finding(rule: Rule, profile: ProfileRecord, leak: MemoryGrowth, how: str) -> Finding:
    holder = f", held by {leak.holder}" if leak.holder else ""
    message = f"{size(leak.bytes_a_step)} more after each {profile.unit}{holder}" + (
        f", {how}" if how else ""
    )
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
    return rule.profile_finding(message, [leak.place], evidence=evidence)
