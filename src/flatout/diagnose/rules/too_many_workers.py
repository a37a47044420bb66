"""The loader has more workers than the machine has cores.

What:
    The loader has several workers per core.
Why it matters:
    Workers beyond the number of cores compete with each other and with the program. Each worker also holds
    its own memory and batches.
How to fix it:
    flatout tune --levers loader COMMAND...
Example:
  - loader = DataLoader(data, batch_size=64, num_workers=64)
  + loader = DataLoader(data, batch_size=64, num_workers=len(os.sched_getaffinity(0)))
"""

from collections.abc import Iterable

from flatout.diagnose.gains import share_of_step
from flatout.diagnose.rule import Rule
from flatout.diagnose.wait_causes import gain_without_wait, has_too_many_workers, how_measured
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord
from flatout.schema.sizes import size


def check(profile: ProfileRecord) -> Iterable[Finding]:
    for loader in profile.loaders:
        if not has_too_many_workers(profile, loader):
            continue
        # torch itself warns from one worker per core on; the cost is reported if it was measured.
        evidence = [f"waiting for data takes {share_of_step(profile, loader.wait_ms)}"]
        if loader.worker_bytes:
            evidence.append(f"the workers hold {size(loader.worker_bytes)} of memory")
        yield RULE.profile_finding(
            f"{loader.workers} workers share {profile.settings.get('cores')} cores with the program",
            [loader.place],
            evidence=evidence,
            predicted=gain_without_wait(profile, loader),
            how=how_measured(profile),
        )


RULE = Rule("FL166", "too_many_workers", Severity.TIME, __doc__, check_profile=check, levers=("loader",))
