"""A debugging aid is left enabled.

What:
    A training program enables `torch.autograd.set_detect_anomaly(True)`, `emit_nvtx`, `gradcheck` or
    `torch.autograd.profiler.profile` unconditionally.
Why it matters:
    Anomaly detection records a Python stack for every operation and checks every gradient for NaN. Steps take
    several times as long. The other aids slow down every operation too.
How to fix it:
    Remove it, or make it optional. The lever `debug_off` disables it for a run.
Example:
  + import sys
  +
    import torch

  - torch.autograd.set_detect_anomaly(True)  # <-
  + torch.autograd.set_detect_anomaly("--debug" in sys.argv)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#disable-debugging-apis
"""

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.gains import event_of
from flatout.diagnose.rewrites import remove_statement
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

SWITCHES = ("torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly")
ALWAYS = (
    "torch.autograd.detect_anomaly",
    "torch.autograd.anomaly_mode.detect_anomaly",
    "torch.autograd.gradcheck",
    "torch.autograd.gradgradcheck",
    "torch.autograd.profiler.emit_nvtx",
    "torch.autograd.profiler.emit_itt",
)


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    if not program.step_loops:
        return
    for event in program.events:
        if event.kind != "call" or not isinstance(event.node, ast.Call) or event.arms:
            continue
        call, dotted = event.node, event.source.dotted(event.node.func)
        first = (
            call.args[0]
            if call.args
            else next((k.value for k in call.keywords if k.arg in ("mode", "enabled")), None)
        )
        on = isinstance(first, ast.Constant) and first.value is True
        trained = event.loops or not dotted.endswith("check")
        if (dotted in SWITCHES and on) or (
            dotted in ALWAYS and (first is None or on or dotted.endswith("check")) and trained
        ):
            yield RULE.finding(
                f"`{event.source.code(call)}` is enabled for the whole training",
                event.place,
                "# remove it, or make it optional",
                edits=remove_statement(event.source, call) if dotted in SWITCHES else [],
            )


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    if not profile.settings.get("anomaly"):
        return
    _, _, places = event_of(profile, "anomaly")
    yield RULE.profile_finding("anomaly detection is enabled in every step", places)


RULE = Rule(
    "FL112",
    "debugging_left_on",
    Severity.TIME,
    __doc__,
    check_source,
    check_profile,
    levers=("debug_off",),
    fix_changes="",
)
