"""Much of a batch is padding.

What:
    Labels behind the end of the rows are ignored, or the attention mask hides these positions from all others.
Why it matters:
    Every layer computes them, and nothing uses the result.
How to fix it:
    Pad to the longest row of the batch, not of the data set. Put rows of similar length into one batch, or several
    rows one behind the other.
Example:
  - batches = DataLoader(rows, batch_size=32, shuffle=True, collate_fn=pad)
  + batches = DataLoader(rows, batch_sampler=by_length(rows, 32), collate_fn=pad)
"""

from collections.abc import Iterable

from flatout.diagnose.gains import event_of, note_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

MUCH = 0.3


def check(profile: ProfileRecord) -> Iterable[Finding]:
    calls, _, places = event_of(profile, "padding")
    if calls and (share := float(note_of(profile, "padding"))) >= MUCH:
        yield RULE.profile_finding(f"{share:.0%} of the positions are padding", places)


RULE = Rule("FL176", "padding", Severity.TIME, __doc__, check_profile=check)
