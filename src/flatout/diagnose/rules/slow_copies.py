"""Copies to the device block the program.

What:
    Batches are copied to the device from memory that is not pinned, or the program waits for the copy.
Why it matters:
    A pageable copy goes through a buffer of the driver. It runs at half the speed and cannot overlap with
    other work.
How to fix it:
    Use DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True).
Example:
  - x = x.to(device)
  + x = x.to(device, non_blocking=True)
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.gains import (
    TIMED,
    certain_gain,
    found,
    how,
    measured,
    said_ms,
    synchronisations,
    without,
)
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord
from flatout.schema.sizes import size


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    seen = [c for c in synchronisations(profile, "to device") if c.pinned is False or c.non_blocking is False]
    total = sum(c.ms for c in seen)
    what_if = certain_gain(profile, "copies")
    ratio = what_if or (None if measured(profile, "copies") else without(profile, total))
    if profile.device == "cpu" or not seen or ratio is None:
        return
    first = seen[0]
    kind = "pageable" if first.pinned is False else "blocking"
    yield found(
        RULE,
        f"{kind} copies move {size(first.moved_bytes)} per {profile.unit} to the device in {said_ms(total)}",
        first.place,
        evidence=[
            f"{c.place.sentence()}: pinned {c.pinned}, non_blocking {c.non_blocking}"
            for c in seen[:4]
            if c.place
        ],
        predicted=ratio,
        how=how("copies") if what_if else TIMED,
        others=[c.place for c in seen[1:] if c.place],
    )


RULE = Rule(
    "FL162",
    "slow_copies",
    Severity.TIME,
    __doc__ or "",
    judge=judge,
    levers=("device_prefetch", "loader", "resident_data"),
)
