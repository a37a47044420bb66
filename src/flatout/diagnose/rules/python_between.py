"""Python code between the phases takes part of the step.

What:
    In each step, the program runs its own code between data, forward, backward and optimizer. This line takes
    most of that time.
Why it matters:
    On a CPU, nothing overlaps with it. On a GPU, the device runs out of work.
How to fix it:
    Run it every hundred steps, use tensors instead of Python numbers, or remove it.
Example:
  - for truth, answer in zip(y, found):
  -     matrix[truth, answer] += 1
  + matrix += torch.bincount(12 * y + found, minlength=144).view(12, 12)
"""

from collections.abc import Iterable

from flatout.diagnose.gains import event_of, share_of_step, speedup_without
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

MUCH = 1.15  # users expect a cheap metric in each step


def check(profile: ProfileRecord) -> Iterable[Finding]:
    _, ms, places = event_of(profile, "between")
    ratio = speedup_without(profile, ms)
    if ratio is None or ratio.median < MUCH or not places:
        return
    yield RULE.profile_finding(
        f"`{places[0].text}` takes {share_of_step(profile, ms)}",
        places,
        predicted=ratio,
        how="the step without this line, by its measured time",
    )


RULE = Rule(
    "FL167",
    "python_between",
    Severity.TIME,
    __doc__,
    check_profile=check,
    replaced_at_its_line_by=(
        "logging_cost",
        "gc_collect_every_step",
        "host_sync_every_step",
        "data_parallel_used",
        "empty_cache_every_step",
        "slowing_down",
        "eval_without_no_grad",
        "leak",
    ),
)
