"""The optimizer takes a large part of the step.

What:
    Updating the parameters takes a part of the step that is worth it, and the optimizer does it parameter by parameter, in many small operations. The
    bound is measured: the same steps with an optimizer that does nothing.
Why it matters:
    The plain loop runs a dozen operations a parameter from Python; the fused form is one pass over memory.
How to mend it:
    Give your optimizer fused=True, or foreach=True where it has no fused form; it stays the same optimizer.
    For a large table of which a batch touches few rows: nn.Embedding(..., sparse=True) and torch.optim.SparseAdam.
Bad:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
Good:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.rule import Rule
from flatout.diagnose.seen import TIMED, bound, found, habit, how, measured, of_step, without
from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import ProfileRecord

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
MUCH = 1.15  # an optimizer that is fused, or of few parameters, rarely takes more than this


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    phase = profile.phases.get("optimizer")
    what_if = bound(profile, "optimizer")
    own = without(profile, phase.share * (profile.step_ms or 0.0)) if phase else what_if
    if own is None or (measured(profile, "optimizer") and what_if is None):
        return
    # No mend saves more than its own time, which also stands for the what-if where there was no time for that.
    ratio = what_if if what_if is not None and what_if.median <= own.median else own
    optimizers = [o for o in profile.settings.get("optimizers") or () if not o.get("fused")]
    if ratio.median < MUCH or not optimizers:
        return
    takes = f"takes {of_step(profile, phase.share * (profile.step_ms or 0.0))}" if phase else "takes much of the step"
    first = max(optimizers, key=lambda o: o.get("tensors") or 0)
    forms = "foreach" if first.get("foreach") else "one parameter after another"
    kind = first.get("kind")
    form = "fused" if kind in FUSED else "foreach"
    evidence = [f"{kind} updates {first.get('tensors')} tensors, {forms}"]
    _, _, places = habit(profile, "make_optimizer")
    yield found(RULE, f"the optimizer {takes}", places[0] if places else None, evidence=evidence, predicted=ratio,
                how=how("optimizer") if ratio is what_if else TIMED, mend=f"{kind}(..., {form}=True)  # with the arguments that it has")


RULE = Rule("FL151", "optimizer_share", Severity.TIME, __doc__ or "", judge=judge, levers=("fused_optimizer",))
