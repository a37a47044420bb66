"""Each step takes longer than the one before.

What:
    The step time grows with the number of steps, beyond chance.
Why it matters:
    Something in the loop processes the whole history: a metric over all outputs so far, a list that is
    searched, or a growing graph.
How to fix it:
    Update sums instead of computing over the whole history again.
Example:
  - answers.append(logits.detach())
  - accuracy = score(torch.cat(answers), torch.cat(labels))
  + right += (logits.argmax(1) == target).sum()
"""

from collections.abc import Iterable, Sequence

from flatout.diagnose.gains import format_ms
from flatout.diagnose.rule import Rule
from flatout.measure.statistics import quantile
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord
from flatout.schema.records import Ratio

FEWEST = 24  # steps, in six blocks of four
BLOCKS = 6
GROWN = 1.15  # the last block over the first


def check(profile: ProfileRecord) -> Iterable[Finding]:
    medians = blocks(profile.step_ms_list)
    if medians is None or medians != sorted(medians) or medians[-1] < GROWN * medians[0]:
        return
    ratio = medians[-1] / medians[0]
    place = (
        profile.tensor_growth.place
        if profile.tensor_growth is not None and profile.tensor_growth.leaking
        else None
    )
    said = f"the time per {profile.unit} grew from {format_ms(medians[0])} to {format_ms(medians[-1])} over {len(profile.step_ms_list)} measurements"
    yield RULE.profile_finding(
        said,
        [place],
        evidence=["medians of equal blocks: " + ", ".join(format_ms(m) for m in medians)],
        predicted=Ratio(ratio, ratio, ratio, len(profile.step_ms_list)),
        how="the first steps of this run versus the last; the step time keeps growing",
    )


def blocks(times: Sequence[float]) -> list[float] | None:
    """Return the medians of six equal blocks, or None if there are too few steps.

    Six medians are in order by chance once in 720 times.
    """
    if len(times) < FEWEST:
        return None
    length = len(times) // BLOCKS
    return [quantile(sorted(times[at * length : (at + 1) * length]), 0.5) for at in range(BLOCKS)]


RULE = Rule("FL170", "slowing_down", Severity.TIME, __doc__, check_profile=check)
