"""Logits are transposed for cross_entropy, which copies them.

What:
    cross_entropy gets logits of (batch, positions, classes) as a transposed view.
Why it matters:
    It normalises over the classes, which are not next to each other in memory. So it copies all logits in each step,
    and the backward pass copies their gradient. With many classes this is the largest tensor of a step.
How to fix it:
    Flatten the positions: `F.cross_entropy(logits.flatten(0, 1), labels.flatten())` gives the same mean.
Example:
  - loss = F.cross_entropy(logits.transpose(1, 2), labels)
  + loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""

from collections.abc import Iterable

from flatout.diagnose.gains import event_of, note_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

MUCH = 0.01  # of the operators' time, in copies


def check(profile: ProfileRecord) -> Iterable[Finding]:
    calls, _, places = event_of(profile, "transposed_logits")
    if not calls:
        return
    copied = [o for o in profile.operations if o.name in ("aten::copy_", "aten::clone")]
    if sum(o.share for o in copied) >= MUCH:
        note = note_of(profile, "transposed_logits")
        yield RULE.profile_finding(f"cross_entropy copies transposed logits in each step: {note}", places)


RULE = Rule("FL175", "transposed_logits", Severity.TIME, __doc__, check_profile=check)
