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

from collections.abc import Iterable

from flatout.diagnose.gains import (
    HOW_BY_TIME,
    certain_gain,
    format_ms,
    how_by_what_if,
    speedup_without,
    synchronisations,
    was_measured,
)
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord
from flatout.schema.sizes import size


def check(profile: ProfileRecord) -> Iterable[Finding]:
    seen = [c for c in synchronisations(profile, "to device") if c.pinned is False or c.non_blocking is False]
    total = sum(c.ms for c in seen)
    what_if = certain_gain(profile, "copies")
    ratio = what_if or (None if was_measured(profile, "copies") else speedup_without(profile, total))
    if profile.device == "cpu" or not seen or ratio is None:
        return
    first = seen[0]
    kind = "pageable" if first.pinned is False else "blocking"
    yield RULE.profile_finding(
        f"{kind} copies move {size(first.moved_bytes)} per {profile.unit} to the device in {format_ms(total)}",
        [c.place for c in seen],
        evidence=[
            f"{c.place.sentence()}: pinned {c.pinned}, non_blocking {c.non_blocking}"
            for c in seen[:4]
            if c.place
        ],
        predicted=ratio,
        how=how_by_what_if("copies") if what_if else HOW_BY_TIME,
    )


RULE = Rule(
    "FL162",
    "slow_copies",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("device_prefetch", "loader", "resident_data"),
)
