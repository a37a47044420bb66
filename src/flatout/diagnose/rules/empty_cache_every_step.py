"""Every step frees the allocator's cache.

What:
    `torch.cuda.empty_cache()` runs in every step of the training loop, or in every batch of an evaluation.
Why it matters:
    PyTorch caches freed memory so that the next step can reuse it immediately. Freeing the cache calls
    `cudaFree`, which waits for the device, and the next step must call `cudaMalloc` again. It does not free
    memory that is in use, so it cannot prevent an out-of-memory error.
How to fix it:
    Remove it. Against fragmentation, set `PYTORCH_ALLOC_CONF=expandable_segments:True` (the lever
    `allocator`).
Example:
    import torch

    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4, device="cuda")).square().mean().backward()
        optimizer.step()
  -     torch.cuda.empty_cache()  # <-
Sources:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

from collections.abc import Iterable

from flatout.diagnose.gains import HOW_BY_TIME, event_of, share_of_step, speedup_without
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    calls, ms, places = event_of(profile, "empty_cache")
    memory = profile.memory
    if memory is not None and memory.empty_cache_calls > calls:
        calls, ms = memory.empty_cache_calls, memory.empty_cache_ms
        places = [memory.empty_cache_place] if memory.empty_cache_place else places
    if calls < 0.2:
        return
    idle = " (without a GPU it has no effect)" if profile.device == "cpu" else ""
    yield RULE.profile_finding(
        f"empty_cache() is called {calls:.3g} times per {profile.unit} and takes {share_of_step(profile, ms)}{idle}",
        places,
        predicted=speedup_without(profile, ms),
        how=HOW_BY_TIME,
    )


RULE = Rule(
    "FL104",
    "empty_cache_every_step",
    Severity.TIME,
    __doc__,
    check_profile=check_profile,
    levers=("allocator",),
)
