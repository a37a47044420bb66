"""Tensors are copied only to change their memory layout.

What:
    contiguous(), clone() and changes of the memory format take part of the step: they write the same numbers
    in another order.
Why it matters:
    A copy reads and writes every byte and computes nothing. The backward pass does it again.
How to fix it:
    Choose one layout at the start (model and images .to(memory_format=torch.channels_last)), and remove
    contiguous(). Or run:
    flatout tune --levers channels_last,compile COMMAND...
Example:
  - x = x.permute(0, 2, 3, 1).contiguous()
  + x = x.to(memory_format=torch.channels_last)
"""

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import Operation, ProfileRecord
from flatout.schema.records import Ratio

COPYING = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy")
MUCH = 0.2  # of the operators' time; views, slices and transposed products always copy a few per cent


def check(profile: ProfileRecord) -> Iterable[Finding]:
    # Copies without a line of the user's code belong to a library or a compiler.
    copies = sorted((o for o in profile.operations if o.name in COPYING and o.place), key=lambda o: -o.share)
    share = sum(o.share for o in copies)
    if share < MUCH or not _reordered(copies):
        return
    computing = _computing(profile)
    ratio = 1 / max(1 - share * computing, 0.05)
    evidence = [
        f"{o.name}: {o.calls:.3g} calls per {profile.unit}, {100 * o.share:.0f} % of the operators' time"
        for o in copies
    ]
    yield RULE.profile_finding(
        f"copying takes {100 * share:.0f} % of the operators' time",
        [next((o.place for o in copies if o.place), None)],
        evidence=evidence,
        predicted=Ratio(ratio, ratio, ratio, max(1, profile.steps)),
        how="estimate: the operators without these copies",
    )


def _reordered(copies: list[Operation]) -> bool:
    """Return whether half of the copies are clones, as from contiguous(); others fill slices or cast."""
    calls = {o.name: o.calls for o in copies}
    return calls.get("aten::clone", 0.0) >= 0.5 * calls.get("aten::copy_", 0.0)


def _computing(profile: ProfileRecord) -> float:
    """Return the share of forward and backward in the step: other rules cover data loading and logging."""
    share = sum(profile.phases[name].share for name in ("forward", "backward") if name in profile.phases)
    return min(1.0, share) if share > 0 else 1.0


RULE = Rule(
    "FL171",
    "layout_copies",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("channels_last", "compile"),
    replaced_by=(
        "data_wait",
        "slow_fetch",
        "loader_made_in_loop",
        "tiny_operators",
        "logging_cost",
        "slowing_down",
        "python_between",
    ),
    replaced_at_its_line_by=("leak", "host_sync_every_step"),
)
