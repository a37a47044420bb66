"""The garbage collector interrupts the step.

What:
    Python's cyclic garbage collector runs within the steps, because many objects are alive and many are made. The gain is measured: the same steps
    with the collector off.
Why it matters:
    A full collection looks at every object that there is; a training program has hundreds of thousands and frees its tensors without it.
How to mend it:
    Once, before the loop: gc.collect(); gc.freeze().
Bad:
    for batch in loader:
        train(batch)
Good:
    gc.collect()
    gc.freeze()
    for batch in loader:
        train(batch)
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.diagnose.seen import TIMED, bound, found, habit, how, of_step, without
from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    timed, (calls, _, _) = without(profile, profile.gc_ms), habit(profile, "gc_collect")
    ratio = bound(profile, "gc")
    # Two witnesses: a collector that takes no time cannot be what makes the difference. Where the program calls it, that is another rule's.
    if timed is None or calls:
        return
    evidence = [f"{profile.gc_calls:.3g} collections a {profile.unit}", f"the longest pause is {profile.gc_longest_ms:.1f} ms"]
    yield found(RULE, f"automatic garbage collection takes {of_step(profile, profile.gc_ms)}", evidence=evidence, predicted=ratio or timed,
                how=how("gc") if ratio else TIMED)


RULE = Rule("FL154", "collecting_garbage", Severity.TIME, __doc__ or "", judge=judge, levers=("gc_pause",))
