"""Binary cross entropy of probabilities runs under autocast.

What:
    `binary_cross_entropy` or `BCELoss` is called inside `with torch.autocast(...)`.
Why it matters:
    Its gradient does not fit into half precision. On CUDA, it raises "binary_cross_entropy and BCELoss are
    unsafe to autocast". A program that was only run on a CPU, or with autocast disabled, stops there on its
    first run on a GPU.
How to fix it:
    Pass the logits to `BCEWithLogitsLoss`. It combines the sigmoid and the loss, is safe under autocast, and
    is more accurate without autocast too.
Example:
    import torch

  - model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Sigmoid())
  - criterion = torch.nn.BCELoss()
  + model = torch.nn.Linear(4, 1)
  + criterion = torch.nn.BCEWithLogitsLoss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(model(torch.randn(8, 4)), torch.zeros(8, 1))  # <-
Sources:
    https://docs.pytorch.org/docs/stable/amp.html#prefer-binary-cross-entropy-with-logits-over-binary-cross-entropy
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.float16_without_scaler import AUTOCAST
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for event in program.events:
        call = event.node
        if event.kind != "call" or not isinstance(call, ast.Call):
            continue
        name = event.source.dotted(call.func)
        unsafe = name == "torch.nn.functional.binary_cross_entropy" or (
            not name and "BCELoss" in program.values.kinds(event.source, call.func)
        )
        if unsafe and under_autocast(event):
            yield RULE.finding(
                "binary cross entropy of probabilities raises an error under autocast on a GPU",
                event.place,
                "torch.nn.functional.binary_cross_entropy_with_logits(logits, target)  # without a sigmoid before it",
            )


def under_autocast(event: ProgramEvent) -> bool:
    """Return whether the innermost autocast around an event is enabled, as far as the source shows."""
    around = [call for _, call in event.within(*AUTOCAST)]
    if not around:
        return False
    enabled = next((k.value for k in around[-1].keywords if k.arg == "enabled"), None)
    return not (isinstance(enabled, ast.Constant) and enabled.value is False)


RULE = Rule("FL308", "bce_under_autocast", Severity.FRAGILE, __doc__, check)
