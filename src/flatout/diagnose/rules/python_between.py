"""Python between the phases takes part of the step.

What:
    Between data, forward, backward and optimizer the program does something of its own in each step, and this line is where most of that time goes.
Why it matters:
    Nothing overlaps with it on a CPU, and on a GPU the device runs dry meanwhile.
How to mend it:
    Do it every hundred steps, in tensors instead of Python numbers, or not at all.
Bad:
    for truth, answer in zip(y, found):
        matrix[truth, answer] += 1
Good:
    matrix += torch.bincount(12 * y + found, minlength=144).view(12, 12)
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.diagnose.seen import found, habit, of_step, without
from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord

MUCH = 1.15  # a cheap metric in each step is what people want


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    _, ms, places = habit(profile, "between")
    ratio = without(profile, ms)
    if ratio is None or ratio.median < MUCH or not places:
        return
    yield found(RULE, f"`{places[0].text}` takes {of_step(profile, ms)}", places[0], predicted=ratio,
                how="this line left out of the step, by its own time", others=places[1:])


RULE = Rule("FL167", "python_between", Severity.TIME, __doc__ or "", judge=judge)
