"""A different number of threads is faster.

What:
    The step was measured with one thread fewer and one thread more, switched inside the running program. One
    of them is faster.
Why it matters:
    Too few threads leave cores idle. Too many wait for each other at the end of every operator, and take
    cores from loader workers.
How to fix it:
    flatout tune --levers threads COMMAND...
Example:
  - torch.set_num_threads(64)
  + torch.set_num_threads(len(os.sched_getaffinity(0)))
"""

from collections.abc import Iterable

from flatout.diagnose.gains import certain_gain, event_of, how_by_what_if, was_measured
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

MUCH = 1.1  # smaller gains vary with the other load of the machine


def check(profile: ProfileRecord) -> Iterable[Finding]:
    threads, cores = profile.settings.get("threads"), profile.settings.get("cores")
    gains = [
        (ratio, name)
        for name in ("one thread fewer", "one thread more")
        if (ratio := certain_gain(profile, name)) is not None and ratio.median >= MUCH
    ]
    _, _, places = event_of(profile, "set_threads")
    if threads and cores and int(threads) > int(cores) and not was_measured(profile, "one thread fewer"):
        # This is often so slow that there was no time to measure it.
        yield RULE.profile_finding(
            f"torch runs on {threads} threads, but the program may use only {cores} cores",
            places[:1],
        )
    if not gains or not threads:
        return
    ratio, name = max(gains, key=lambda gain: gain[0].median)
    other = max(
        1, int(threads) + 1 if name.endswith("more") else min(int(threads) - 1, int(cores or threads))
    )
    yield RULE.profile_finding(
        f"torch runs on {threads} threads of {cores} cores; {other} are faster",
        places[:1],
        evidence=[f"{name}: {ratio.sentence()}"],
        predicted=ratio,
        how=how_by_what_if(name),
    )


RULE = Rule(
    "FL158",
    "thread_count",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("threads",),
    replaced_by=("too_many_workers",),
)
