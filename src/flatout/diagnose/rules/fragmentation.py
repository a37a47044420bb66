"""Memory is fragmented.

What:
    The allocator had to free cached blocks and retry, or it reserves far more than the peak needs.
Why it matters:
    Each retry frees the whole cache and waits for the device. The program can also run out of memory while
    enough is free, but in separate pieces.
How to fix it:
    Set PYTORCH_ALLOC_CONF=expandable_segments:True, or run:
    flatout tune --levers allocator COMMAND...
Example:
  - batch = torch.empty(random_length(), device="cuda")
  + import os
  + os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
"""

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord
from flatout.schema.sizes import size

LOOSE = 0.25  # share of the reserved memory that is unused at the peak


def check(profile: ProfileRecord) -> Iterable[Finding]:
    memory = profile.memory
    if memory is None or memory.where != "device":
        return
    unused = (memory.reserved_bytes or 0) - memory.peak_bytes
    if memory.retries:
        yield RULE.profile_finding(
            f"the allocator had to free its cache and retry {memory.retries} times",
            [memory.peak_place],
            evidence=[
                f"{size(unused)} of {size(memory.reserved_bytes or 0)} reserved memory was unused at the peak"
            ],
        )
    elif memory.reserved_bytes and unused > LOOSE * memory.reserved_bytes and _scarce(profile):
        yield RULE.profile_finding(
            f"{size(unused)} of {size(memory.reserved_bytes)} reserved memory was unused at the peak",
            [memory.peak_place],
        )


def _scarce(profile: ProfileRecord) -> bool:
    """Return whether little memory is left: only then does fragmentation matter."""
    total = profile.ceilings.get("memory_bytes") or next(
        (g.get("memory_bytes") for g in profile.machine.get("gpus") or () if isinstance(g, dict)), None
    )
    return bool(total and profile.memory and (profile.memory.reserved_bytes or 0) > 0.7 * total)


RULE = Rule(
    "FL254",
    "fragmentation",
    Severity.MEMORY,
    __doc__,
    check_profile=check,
    levers=("allocator",),
)
