"""Every step runs Python's garbage collector.

What:
    `gc.collect()` runs in every step of the training loop, or in every batch of an evaluation.
Why it matters:
    A full collection visits every object of the program. It takes tens of milliseconds once torch is loaded.
    Tensors are freed by their reference counts, without the collector.
How to fix it:
    Remove it. If memory then grows, a reference cycle holds tensors. Collecting once per epoch is then
    enough.
Example:
    import gc

    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - for _ in range(100):
  -     optimizer.zero_grad()
  -     model(torch.randn(8, 4)).square().mean().backward()
  -     optimizer.step()
  + for epoch in range(10):
  +     for _ in range(100):
  +         optimizer.zero_grad()
  +         model(torch.randn(8, 4)).square().mean().backward()
  +         optimizer.step()
        gc.collect()  # <-
"""

from collections.abc import Iterable

from flatout.diagnose.gains import (
    HOW_BY_TIME,
    certain_gain,
    event_of,
    how_by_what_if,
    share_of_step,
    speedup_without,
)
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    calls, ms, places = event_of(profile, "gc_collect")
    timed = speedup_without(profile, ms)
    if timed is not None:
        ratio = certain_gain(profile, "gc")
        yield RULE.profile_finding(
            f"gc.collect() is called {calls:.3g} times per {profile.unit} and takes {share_of_step(profile, ms)}",
            places,
            predicted=ratio or timed,
            how=how_by_what_if("gc") if ratio else HOW_BY_TIME,
            levers=(),
        )


RULE = Rule(
    "FL105",
    "gc_collect_every_step",
    Severity.TIME,
    __doc__,
    check_profile=check_profile,
    levers=("gc_pause",),
)
