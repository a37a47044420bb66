"""The scheduler is recreated during training.

What:
    The loop creates a learning-rate scheduler repeatedly.
Why it matters:
    Each new scheduler starts at step zero and takes the current rate as the initial one. The schedule is
    never followed.
How to fix it:
    Create it once, before the loop.
Example:
  + scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    for epoch in range(90):
  -     scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
        train(model, optimizer)
        scheduler.step()
"""

from collections.abc import Iterable

from flatout.diagnose.gains import MIN_REPEATS, calls_at_busiest_line, event_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check(profile: ProfileRecord) -> Iterable[Finding]:
    _, _, places = event_of(profile, "make_scheduler")
    made = calls_at_busiest_line(profile, "make_scheduler")
    if places and made >= MIN_REPEATS:
        yield RULE.profile_finding(f"this line has created {made} schedulers", places[:1])


RULE = Rule("FL053", "scheduler_remade", Severity.WRONG, __doc__, check_profile=check)
