"""What goes wrong without an exception: a loss that is NaN in a log."""

import math
import re

from flatout.diagnose.kind import Diagnosis, kind
from flatout.diagnose.logs import losses
from flatout.schema.failure import FailureRecord
from flatout.schema.findings import Finding, Severity

MIN_GROWTH = 3.0  # times the smallest of the last losses
MAX_PREVIOUS = 8
FLOAT16 = re.compile(r"fp16|float16|gradscaler|loss.?scale", re.IGNORECASE)


@kind("FE110", "loss-not-finite", severity=Severity.WRONG)
def loss_not_finite(failure: FailureRecord) -> Diagnosis | None:
    """The loss is NaN or infinite, and the program goes on.

    Why it happens:
        If the loss grew before: the learning rate is too high, or gradients are not clipped. If it came at once:
        a division by zero, a logarithm or a square root of zero, an average over no element (a mask that hides
        all of a sample), a NaN in the data, or float16 without a gradient scaler.
    How to fix it:
        `flatout run --supervise --on-nan stop` ends the run at the first such loss, before a checkpoint holds
        it. `torch.autograd.set_detect_anomaly(True)` names the operator whose gradient is NaN.
        `flatout lr` finds the largest stable learning rate, `flatout check` finds the usual mistakes.
    Sources:
        https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection"""
    if failure.chain:
        return None
    previous: list[float] = []
    for line in failure.log_lines:
        for name, value in losses(line):
            if math.isfinite(value):
                previous = [*previous[1 - MAX_PREVIOUS :], value]
                continue
            return _diagnosis(name, value, line, previous, any(map(FLOAT16.search, failure.log_lines)))
    return None


def _diagnosis(name: str, value: float, line: str, previous: list[float], in_float16: bool) -> Diagnosis:
    diverged = len(previous) > 1 and previous[-1] > MIN_GROWTH * min(map(abs, previous)) > 0
    lower_rate = "flatout lr python train.py   # a lower learning rate, or torch.nn.utils.clip_grad_norm_"
    anomaly = "torch.autograd.set_detect_anomaly(True)   # names the operator; run without float16"
    anomaly += " and its scaler first" if in_float16 else ""
    development = "in the first line that shows it"
    if diverged:
        development = (
            f"after it had grown from {min(previous):.4g} to {previous[-1]:.4g}: the training diverged"
        )
    elif previous:
        development = f"at once, after {previous[-1]:.4g}: one operator or one sample made it"
    value_text = "NaN" if math.isnan(value) else "infinite"
    return Diagnosis(
        f"`{name}` became {value_text} {development}",
        "\n".join(
            [lower_rate if diverged else anomaly, "flatout run --supervise --on-nan stop python train.py"]
        ),
        [f"the first such line: {line.strip()[:160]}"],
    )


def log_symptom(lines: list[str]) -> Finding | None:
    """The symptom that a log without an exception shows."""
    return loss_not_finite.explain(FailureRecord([], lines))
