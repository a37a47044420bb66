"""Every step waits for the device.

What:
    Every step fetches a value from the device: `loss.item()`, `float(loss)`, `.cpu()`, `.numpy()`,
    `.tolist()`, printing a tensor, `if mask.sum() > 0` in a loss function, or any of these in the `step` of an
    own optimizer.
Why it matters:
    The host queues work ahead of the device. To read a value, it must wait until all queued work is done. The
    device then idles until the host has queued more. With small steps, this takes a large share of the time.
    (On a CPU it costs nothing.)
How to fix it:
    Keep a running total on the device (`total += loss.detach()`), and fetch it every hundred steps or once
    per epoch. With the lever `early_values`, a read after the backward pass waits only for the forward pass.
Example:
    import torch

    device = torch.device("cuda")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - total = 0.0
  + total = torch.zeros((), device=device)
    for step in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
  -     total += loss.item()  # <-
  +     total += loss.detach()
  +     if step % 10 == 0:
  +         print(total.item())
Sources:
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization
"""

from collections.abc import Iterable

from flatout.diagnose.gains import (
    HOW_BY_TIME,
    certain_gain,
    format_ms,
    how_by_what_if,
    share_of_step,
    speedup_without,
    synchronisations,
    was_measured,
)
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

KINDS = ("item", "nonzero", "to host", "numpy", "compare", "tolist", "synchronize")


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    seen = [c for c in synchronisations(profile, *KINDS) if c.place is not None and c.calls >= 0.5]
    total = sum(c.ms for c in seen)
    what_if = certain_gain(profile, "syncs")
    ratio = what_if or (
        None
        if was_measured(profile, "syncs") and profile.device != "cpu"
        else speedup_without(profile, total)
    )
    if not seen or ratio is None:
        return
    evidence = [
        f"{c.place.sentence()}: {c.kind}, {c.calls:.3g} times per {profile.unit}, {format_ms(c.ms)}"
        for c in seen[:6]
        if c.place
    ]
    yield RULE.profile_finding(
        f"waiting for values takes {share_of_step(profile, total)}, most of it here",
        [c.place for c in seen],
        evidence=evidence,
        predicted=ratio,
        how=how_by_what_if("syncs") if what_if else HOW_BY_TIME,
    )


RULE = Rule(
    "FL101",
    "host_sync_every_step",
    Severity.TIME,
    __doc__,
    check_profile=check_profile,
    levers=("early_values",),
    replaced_at_its_line_by=("logging_cost",),
)
