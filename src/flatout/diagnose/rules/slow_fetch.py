"""Fetching a sample is slow, and this line takes most of the time.

What:
    The step waits for its loader. Most of the fetching time is spent in one line of the data set or the
    collate function.
Why it matters:
    That line runs once per sample, in Python. Each epoch pays its cost again.
How to fix it:
    Do the work once, when creating the data set, or for the whole batch at once. Or let workers do it in
    parallel:
    flatout tune --levers cached_prefix,batched_transforms,loader COMMAND...
Example:
    class Images(Dataset):
  +     def __init__(self, files):
  +         self.images = [decode(file) for file in files]
        def __getitem__(self, i):
  -         return decode(self.files[i])
  +         return self.images[i]
"""

from collections.abc import Iterable

from flatout.diagnose.gains import share_of_step
from flatout.diagnose.rule import Rule
from flatout.diagnose.wait_causes import WaitCause, gain_without_wait, how_measured, wait_cause
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check(profile: ProfileRecord) -> Iterable[Finding]:
    for loader in profile.loaders:
        if wait_cause(profile, loader) is not WaitCause.SLOW_FETCH or loader.slow_place is None:
            continue
        evidence = [f"waiting for data takes {share_of_step(profile, loader.wait_ms)}"]
        if loader.fetch_ms is not None:
            where = (
                f"by {loader.workers} worker{'s'[: loader.workers - 1]}"
                if loader.workers
                else "in the training process"
            )
            evidence.append(
                f"fetching a batch of {loader.batch_size} takes {loader.fetch_ms:.1f} ms, {where}"
            )
        share = f"{100 * (loader.slow_share or 0):.0f} % of the fetching time is spent in `{loader.slow_place.text}`"
        yield RULE.profile_finding(
            share,
            [loader.slow_place, loader.place],
            evidence=evidence,
            predicted=gain_without_wait(profile, loader),
            how=how_measured(profile),
        )


RULE = Rule(
    "FL161",
    "slow_fetch",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("cached_prefix", "batched_transforms", "loader", "resident_data"),
    replaced_at_its_line_by=("host_growth",),
)
