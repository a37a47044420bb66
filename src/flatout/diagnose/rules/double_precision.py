"""The step computes in double precision.

What:
    Operators on float64 tensors take part of the step. NumPy floats are doubles by default, and
    torch.from_numpy keeps that type. Or a few lines in the middle of a float32 model convert to float64.
Why it matters:
    Doubles are half as fast as float32 on a CPU and take twice the memory. On most GPUs they are 32 or 64
    times slower.
How to fix it:
    Use torch.from_numpy(array).float(), and do not call model.double().
Example:
  - x = torch.from_numpy(array)
  - model = model.double()
  + x = torch.from_numpy(array).float()
"""

from collections.abc import Iterable

from flatout.diagnose.gains import MIN_GAIN, event_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import Operation, ProfileRecord
from flatout.schema.records import Ratio

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "convolution_backward", "conv2d")
FASTER = 2.0  # float32 versus float64 when memory or vector width is the limit


def check(profile: ProfileRecord) -> Iterable[Finding]:
    casts = [
        o
        for o in profile.operations
        if o.name == "aten::copy_" and o.dtypes[:1] == ["float64"] and o.shapes  # not of a single number
    ]
    if (
        not casts
        and not any(_double(o) and o.name.endswith(PRODUCTS) for o in profile.operations)
        and "float64" not in (profile.settings.get("dtypes") or {})
    ):
        return  # a Python number next to a tensor is a double too, and costs nothing
    doubles = sorted((o for o in profile.operations if _double(o)), key=lambda o: -o.share)
    share = min(1.0, sum(o.share for o in doubles))
    ratio = 1 / (1 - share * (1 - 1 / FASTER))
    if ratio < MIN_GAIN:
        return
    _, _, called = event_of(profile, "forward")
    place = next((o.place for o in [*casts, *doubles] if o.place), called[0] if called else None)
    evidence = [f"{o.name}: {100 * o.share:.0f} % of the operators' time" for o in doubles[:5]]
    yield RULE.profile_finding(
        f"{100 * share:.0f} % of the operators' time is spent on float64",
        [place],
        evidence=evidence,
        predicted=Ratio(ratio, ratio, ratio, max(1, profile.steps)),
        how="estimate: these operators at twice the speed",
    )


def _double(operation: Operation) -> bool:
    return any(name in kind for kind in operation.dtypes for name in ("float64", "double", "complex128"))


RULE = Rule("FL157", "double_precision", Severity.TIME, __doc__, check_profile=check)
