"""The optimizer takes a large part of the step.

What:
    Updating the parameters takes a significant part of the step. The optimizer updates them one by one, in
    many small operations. The limit of the gain is measured: the same steps run with an optimizer that does
    nothing.
Why it matters:
    The plain loop runs a dozen operations per parameter from Python. The fused form is one pass over memory.
How to fix it:
    Set fused=True in your optimizer, or foreach=True if it has no fused form. It stays the same optimizer.
    For a large table of which a batch uses few rows, use nn.Embedding(..., sparse=True) and
    torch.optim.SparseAdam.
Example:
  - optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
  + optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
"""

from collections.abc import Iterable

from flatout.diagnose.gains import (
    HOW_BY_TIME,
    certain_gain,
    event_of,
    how_by_what_if,
    share_of_step,
    speedup_without,
    was_measured,
)
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
MUCH = 1.15  # a fused optimizer, or one with few parameters, rarely takes more than this


def check(profile: ProfileRecord) -> Iterable[Finding]:
    phase = profile.phases.get("optimizer")
    what_if = certain_gain(profile, "optimizer")
    own = speedup_without(profile, phase.share * (profile.mean_step_ms or 0.0)) if phase else what_if
    if own is None or (was_measured(profile, "optimizer") and what_if is None):
        return
    # No fix saves more than the optimizer's own time, which also replaces a what-if that was not measured.
    ratio = what_if if what_if is not None and what_if.median <= own.median else own
    optimizers = [o for o in profile.settings.get("optimizers") or () if not o.get("fused")]
    if ratio.median < MUCH or not optimizers:
        return
    takes = (
        f"takes {share_of_step(profile, phase.share * (profile.mean_step_ms or 0.0))}"
        if phase
        else "takes much of the step"
    )
    first = max(optimizers, key=lambda o: o.get("tensors") or 0)
    forms = "foreach" if first.get("foreach") else "one parameter at a time"
    kind = first.get("kind")
    form = "fused" if kind in FUSED else "foreach"
    evidence = [f"{kind} updates {first.get('tensors')} tensors, {forms}"]
    _, _, places = event_of(profile, "make_optimizer")
    yield RULE.profile_finding(
        f"the optimizer {takes}",
        places[:1],
        evidence=evidence,
        predicted=ratio,
        how=how_by_what_if("optimizer") if ratio is what_if else HOW_BY_TIME,
        fix=f"{kind}(..., {form}=True)  # keep its other arguments",
    )


RULE = Rule(
    "FL151",
    "optimizer_share",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("fused_optimizer",),
)
