"""The garbage collector interrupts the step.

What:
    Python's cyclic garbage collector runs during the steps, because the program has many live objects and
    creates many. The gain is measured: the same steps run with the collector disabled.
Why it matters:
    A full collection visits every live object. A training program has hundreds of thousands of objects, and
    frees its tensors without the collector.
How to fix it:
    Call gc.collect() and gc.freeze() once, before the loop.
Example:
  + gc.collect()
  + gc.freeze()
    for batch in loader:
        train(batch)
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


def check(profile: ProfileRecord) -> Iterable[Finding]:
    timed, (calls, _, _) = speedup_without(profile, profile.gc_ms), event_of(profile, "gc_collect")
    ratio = certain_gain(profile, "gc")
    # A collector that takes no time cannot explain the gain. Calls by the program belong to another rule.
    if timed is None or calls:
        return
    evidence = [
        f"{profile.gc_calls:.3g} collections per {profile.unit}",
        f"the longest pause is {profile.gc_longest_ms:.1f} ms",
    ]
    yield RULE.profile_finding(
        f"automatic garbage collection takes {share_of_step(profile, profile.gc_ms)}",
        evidence=evidence,
        predicted=ratio or timed,
        how=how_by_what_if("gc") if ratio else HOW_BY_TIME,
    )


RULE = Rule(
    "FL154",
    "collecting_garbage",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("gc_pause",),
    replaced_by=("host_growth",),
)
