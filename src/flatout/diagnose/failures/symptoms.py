"""What goes wrong without an exception: a loss that is NaN in a log, a run that became slower, an idle GPU."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from flatout.diagnose.bottleneck import shares
from flatout.diagnose.kind import Diagnosis, kind
from flatout.diagnose.logs import losses
from flatout.schema.compare import CompareRecord
from flatout.schema.failure import FailureRecord
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord
from flatout.schema.records import Record
from flatout.schema.run_summary import BUSY, WAITS, RunSummary

GREW = 3.0  # times the smallest of the last losses
LAST = 8
OTHERS = 3  # further findings of a profile to show
WASTED = {  # bounds of a step in which the device does no work for the model
    "data": "spent waiting for data",
    "copy": "spent on copies to the device",
    "python": "spent in Python, outside operators",
    "launch": "spent on launching operators",
}
HALF = re.compile(r"fp16|float16|gradscaler|loss.?scale", re.IGNORECASE)


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
        https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
    """
    if failure.chain:
        return None
    before: list[float] = []
    for line in failure.around:
        for name, value in losses(line):
            if math.isfinite(value):
                before = [*before[1 - LAST :], value]
                continue
            return _not_finite(name, value, line, before, any(map(HALF.search, failure.around)))
    return None


def _not_finite(name: str, value: float, line: str, before: list[float], half: bool) -> Diagnosis:
    grew = len(before) > 1 and before[-1] > GREW * min(map(abs, before)) > 0
    lower = "flatout lr python train.py   # a lower learning rate, or torch.nn.utils.clip_grad_norm_"
    anomaly = "torch.autograd.set_detect_anomaly(True)   # names the operator; run without float16" + (
        " and its scaler first" if half else ""
    )
    how = (
        f"after it had grown from {min(before):.4g} to {before[-1]:.4g}: the training diverged"
        if grew
        else f"at once, after {before[-1]:.4g}: one operator or one sample made it"
        if before
        else "in the first line that shows it"
    )
    what = "NaN" if math.isnan(value) else "infinite"
    return Diagnosis(
        f"`{name}` became {what} {how}",
        "\n".join([lower if grew else anomaly, "flatout run --supervise --on-nan stop python train.py"]),
        [f"the first such line: {line.strip()[:160]}"],
    )


@kind("FE111", "slower-than-before", judged=CompareRecord, severity=Severity.TIME)
def slower(record: CompareRecord) -> Diagnosis | None:
    """A program became slower.

    Why it happens:
        `flatout compare` measured that B takes longer than A. The phase that grew says where to look: a wait for data, the forward pass, the optimizer. A new version
        of a package explains it if the source is the same.
    How to fix it:
        `git bisect run flatout compare` finds the commit. For a package, compare two environments:
        `flatout compare 'OLD/bin/python train.py' 'NEW/bin/python train.py'`.
        `flatout profile` shows the lines and operators of the phase that grew.
    Sources:
        https://docs.pytorch.org/docs/stable/profiler.html
    """
    seen, a, b = record.step_time, record.a, record.b
    if seen is None or a is None or b is None or seen.low <= 0:
        return None
    grown = {name: ms for name, (ms, low, _) in record.phases_ms.items() if low > 0}
    where = max(grown, key=lambda name: grown[name], default="")
    phase = f", most of it in {where} ({grown[where]:+.3g} ms)" if where else ""
    versions = [
        f"{name} {a.versions[name]} became {b.versions[name]}"
        for name in a.versions.keys() & b.versions.keys()
        if a.versions[name] != b.versions[name]
    ]
    command = shlex.join(b.command)
    fixes = [f"flatout profile {command}"]
    if a.revision != b.revision:
        fixes[:0] = [
            f"git bisect start {b.revision or 'HEAD'} {a.revision}",
            f"git bisect run flatout compare --rev {a.revision}.. --gate {50 * seen.value:.1f}% {command}",
        ]
    memory = record.memory
    more = [f"peak memory {100 * memory.value:+.1f} %"] if memory is not None and memory.certain else []
    return Diagnosis(
        f"{b.label} takes {100 * seen.value:.1f} % more time a {b.unit} than {a.label} "
        f"({100 * seen.low:.1f} to {100 * seen.high:.1f} %, {seen.n} pairs){phase}",
        "\n".join(fixes),
        [*versions, *more, f"losses: {record.losses.verdict}"],
    )


@kind("FE112", "device-waits", judged=RunSummary, severity=Severity.TIME)
def device_waits(record: RunSummary) -> Diagnosis | None:
    """The GPU, or the program, spent much of a run waiting.

    Why it happens:
        The loader is slower than the model. Or the host launches work more slowly than the GPU does it: many
        small operators, values read in every step, Python between the phases.
    How to fix it:
        `flatout profile` names the lines, and `flatout tune` tries what needs no edit.
    Sources:
        https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """
    idle = record.gpu_busy is not None and record.gpu_busy < BUSY
    if record.data_wait < WAITS and not idle:
        return None
    return Diagnosis(
        f"the run was limited by {record.limited_by}",
        "\n".join(f"flatout {each} {shlex.join(record.command)}" for each in ("profile", "tune")),
        [f"{record.steps_per_s or 0:.3g} steps/s over {record.steps} steps"],
    )


@kind("FE113", "device-badly-used", judged=ProfileRecord, severity=Severity.TIME)
def device_badly_used(record: ProfileRecord) -> Diagnosis | None:
    """The GPU or the CPU is badly used in every step.

    Why it happens:
        The first line names what takes the time, and the line of the program where it happens. Further findings
        of the record follow.
    How to fix it:
        Edit the line, or let `flatout tune` try the levers that need no edit. Profile again afterwards.
    Sources:
        https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """
    command = shlex.join(record.command)
    whole = record.mean_step_ms
    if not whole:
        why = record.message or "the program ended before one"
        return Diagnosis(f"no step was measured: {why}", f"flatout profile {command}")
    who = "the CPU" if record.device in ("", "cpu") else "the GPU"
    waste = {bound: share for bound, share in shares(record).items() if bound in WASTED and share >= WAITS}
    worst = max(waste, key=lambda bound: waste[bound], default="")
    idle = (record.idle_ms or 0.0) / whole
    slow = sorted(
        (finding for finding in record.findings if finding.severity == Severity.TIME),
        key=lambda finding: -(finding.predicted.median if finding.predicted else 1.0),
    )
    if worst:
        said = f"{who} is badly used: {waste[worst]:.0%} of the {record.unit} is {WASTED[worst]}"
    elif idle > 1 - BUSY:
        said = f"{who} is badly used"
    elif slow and slow[0].predicted is not None:
        said = f"{who} computes, but not as fast as it could"
    else:
        return None
    if idle > 1 - BUSY:
        said += f"; it is idle {idle:.0%} of the time"
    first = slow[0] if slow else None
    others = [finding for finding in record.findings if finding is not first]
    return Diagnosis(
        said,
        "\n".join(_next_steps(first, command)),
        [*_evidence(first), *filter(None, map(_in_short, others[:OTHERS]))],
        first.place if first is not None else None,
    )


def _evidence(finding: Finding | None) -> list[str]:
    if finding is None:
        return []
    ratio = finding.predicted
    gain = f"without it: up to {ratio.sentence()} as fast" if ratio is not None else ""
    return [f"{finding.rule} {finding.said}", gain, *finding.evidence[:2]]


def _in_short(finding: Finding) -> str:
    where = f" ({finding.place.sentence()})" if finding.place is not None else ""
    return f"also {finding.rule}: {finding.said}{where}"


def _next_steps(finding: Finding | None, command: str) -> list[str]:
    """The fix of a finding and the next commands."""
    if finding is None:
        return [f"flatout check {command}", f"flatout tune {command}"]
    lines = [line.replace("COMMAND...", command) for line in finding.fix.split("\n") if line]
    if not any("flatout tune" in line for line in lines):
        levers = f"--levers {','.join(finding.levers)} " if finding.levers else ""
        lines.append(f"flatout tune {levers}{command}")
    return lines


JUDGED = (slower, device_waits, device_badly_used)
MARKS: dict[type[Record], set[str]] = {  # fields that tell a record from other JSON
    CompareRecord: {"step_time", "phases_ms", "pairs"},
    RunSummary: {"data_wait", "gpu_busy", "cores_used"},
    ProfileRecord: {"what_ifs", "operations", "phases"},
}


def of_log(lines: list[str]) -> Finding | None:
    """The symptom that a log without an exception shows."""
    return loss_not_finite.explain(FailureRecord([], lines))


def of_record(data: Mapping[str, Any]) -> Iterator[Finding]:
    """The symptoms in a record of `flatout compare`, `flatout profile` or a run. Raises nothing for other JSON."""
    for one in JUDGED:
        if one.judged is None or not {"schema", *MARKS[one.judged]} <= data.keys():
            continue
        try:
            finding = one.finding(one.judge(one.judged.from_json(dict(data))))
        except (TypeError, AttributeError, KeyError, ValueError):
            continue
        if finding is not None:
            yield finding
