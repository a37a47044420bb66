"""The step waits for data.

What:
    The program requests the next batch from its loader, and the batch is not ready. The gain is measured: the
    same steps run with batches that are ready.
Why it matters:
    Nothing is computed during the wait. Optimising the model does not recover that time.
How to fix it:
    flatout tune --levers loader,cached_prefix,batched_transforms,resident_data COMMAND...
Example:
  - loader = DataLoader(data, batch_size=64)
  + loader = DataLoader(data, batch_size=64, num_workers=2, persistent_workers=True)
"""

from collections.abc import Iterable

from flatout.diagnose.gains import share_of_step
from flatout.diagnose.rule import Rule
from flatout.diagnose.wait_causes import WaitCause, gain_without_wait, how_measured, wait_cause
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check(profile: ProfileRecord) -> Iterable[Finding]:
    for loader in profile.loaders:
        if wait_cause(profile, loader) is not WaitCause.WAIT:
            continue
        evidence = [
            f"the loader over {loader.dataset or 'its data set'} has {loader.workers} workers and batches of {loader.batch_size}"
        ]
        if loader.fetch_ms is not None:
            evidence.append(f"fetching a batch takes {loader.fetch_ms:.1f} ms inside the data set")
        yield RULE.profile_finding(
            f"waiting for data takes {share_of_step(profile, loader.wait_ms)}",
            [loader.place],
            evidence=evidence,
            predicted=gain_without_wait(profile, loader),
            how=how_measured(profile),
        )


RULE = Rule(
    "FL150",
    "data_wait",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("loader", "cached_prefix", "batched_transforms", "resident_data", "device_prefetch"),
)
