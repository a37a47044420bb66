"""Printing, logging or saving takes part of the step.

What:
    The program prints, writes a log or saves a checkpoint in every step or nearly every step. The gain is
    measured: the same steps run without it.
Why it matters:
    Writing waits for a terminal or a disk. Formatting a tensor waits for its value. A checkpoint copies every
    parameter.
How to fix it:
    Put it behind a condition such as if step % 100 == 0:
Example:
    for step, batch in enumerate(loader):
  -     print(step, train(batch))
  +     loss = train(batch)
  +     if step % 100 == 0:
  +         print(step, loss)
"""

from collections.abc import Iterable

from flatout.diagnose.gains import (
    HOW_BY_TIME,
    certain_gain,
    event_of,
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


def check(profile: ProfileRecord) -> Iterable[Finding]:
    printed = [
        (c.ms, f"print, {c.calls:.3g} times per {profile.unit}", c.place)
        for c in synchronisations(profile, "print")
    ]
    for name in ("save", "write", "flush"):
        calls, ms, places = event_of(profile, name)
        printed += [(ms, f"{name}, {calls:.3g} times per {profile.unit}", place) for place in places[:1]]
    seen = sorted((entry for entry in printed if entry[2] is not None), key=lambda entry: -entry[0])
    total = sum(ms for ms, _, _ in seen)
    what_if = certain_gain(profile, "logging")
    ratio = what_if or (None if was_measured(profile, "logging") else speedup_without(profile, total))
    if not seen or ratio is None or speedup_without(profile, total) is None:
        return
    yield RULE.profile_finding(
        f"{seen[0][1].split(',')[0]} and similar calls take {share_of_step(profile, total)}",
        [place for _, _, place in seen],
        evidence=[f"{place.sentence()}: {what}, {format_ms(ms)}" for ms, what, place in seen[:4] if place],
        predicted=ratio,
        how=how_by_what_if("logging") if what_if else HOW_BY_TIME,
    )


RULE = Rule("FL163", "logging_cost", Severity.TIME, __doc__, check_profile=check)
