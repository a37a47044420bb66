"""The step consists of many tiny operations.

What:
    The step calls so many operators that Python and the dispatcher cost more than the arithmetic.
Why it matters:
    An operator costs the host a few microseconds, however little it computes. A thousand operators on single
    samples do the work of three on the batch.
How to fix it:
    Call the model on the whole batch instead of looping over samples. Use torch.vmap for a function that only
    handles single samples. Or run:
    flatout tune --levers compile,fused_ops COMMAND...
Example:
  - loss = sum(criterion(model(x[i]), y[i]) for i in range(len(x)))
  + loss = criterion(model(x), y) * len(x)
"""

from collections.abc import Iterable

from flatout.diagnose.gains import MIN_GAIN, format_ms
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord
from flatout.schema.records import Ratio

MANY = 1500  # operators per step; a network with a hundred layers calls about a thousand
TINY_US = 60.0  # per call, including its callees
FLOOR_US = 5.0  # cost of a call that computes nothing


def check(profile: ProfileRecord) -> Iterable[Finding]:
    calls, each_us, step = profile.operators_a_step, profile.operator_us, profile.step_ms
    if (
        not calls
        or not step
        or calls < MANY
        or each_us is None
        or each_us > TINY_US
        or profile.bound not in ("python", "launch")
    ):
        return
    idle_ms = calls * FLOOR_US / 1000 + (profile.python_ms or 0.0)
    ratio = step / max(step - min(idle_ms, 0.9 * step), 0.1 * step)
    busiest = max((o for o in profile.operations if o.place), key=lambda o: o.calls, default=None)
    evidence = [
        f"{o.name}: {o.calls:.0f} calls, {format_ms(o.host_ms)}"
        for o in sorted(profile.operations, key=lambda o: -o.calls)[:4]
    ]
    if ratio >= MIN_GAIN:
        yield RULE.profile_finding(
            f"a {profile.unit} of {format_ms(step)} calls {calls:.0f} operators of {each_us:.0f} us each",
            [busiest.place if busiest else None],
            evidence=[profile.bound_why, *evidence] if profile.bound_why else evidence,
            predicted=Ratio(ratio, ratio, ratio, max(1, profile.steps)),
            how=f"estimate: the host's time outside arithmetic, {FLOOR_US:g} us per operator",
        )


RULE = Rule(
    "FL153",
    "tiny_operators",
    Severity.TIME,
    __doc__,
    check_profile=check,
    levers=("compile", "fused_ops"),
    replaced_by=("host_sync_every_step", "data_wait", "slow_fetch", "python_between"),
)
