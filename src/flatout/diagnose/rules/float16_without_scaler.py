"""Half precision is used without a GradScaler.

What:
    The forward pass runs under `autocast` in float16 (the default type on CUDA), and the loss is not scaled.
Why it matters:
    The smallest normal float16 is 6e-5. Gradients below about 6e-8 become zero; in deep networks, these are a
    large share. The loss falls at first, then stalls at too high a value.
How to fix it:
    Use bfloat16, which has the range of float32 and needs no scaler:
    `torch.autocast("cuda", dtype=torch.bfloat16)`. Or scale the loss with `torch.amp.GradScaler("cuda")`.
Example:
    import torch

    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
  -     with torch.autocast("cuda"):  # <-
  +     with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 4, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
Sources:
    Micikevicius et al., Mixed Precision Training, ICLR 2018; https://docs.pytorch.org/docs/stable/amp.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

AUTOCAST = (
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.amp.autocast_mode.autocast",
)


def check(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions(
        "GradScaler", "ShardedGradScaler", "Accelerator", "Fabric", "Trainer", "scaler", "initialize"
    ):
        return
    for loop in program.step_loops:
        for event in loop.events:
            for source, call in event.within(*AUTOCAST):
                if any(event.kind == "backward" for event in loop.events) and is_half(source, call):
                    yield RULE.finding(
                        "this autocast computes in float16, and small gradients become zero without a GradScaler",
                        source.place(call),
                        'torch.autocast("cuda", dtype=torch.bfloat16)',
                    )


def is_half(source: SourceFile, call: ast.Call) -> bool:
    """Return whether an autocast certainly computes in float16 on CUDA, by name or by default."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in options or (
        "enabled" in options
        and not (isinstance(options["enabled"], ast.Constant) and options["enabled"].value is True)
    ):
        return False
    legacy = source.dotted(call.func).startswith("torch.cuda.")
    first = call.args[0] if call.args else options.get("device_type")
    on_cuda = legacy or (isinstance(first, ast.Constant) and str(first.value).startswith("cuda"))
    if legacy and call.args:
        return False  # its first argument is `enabled`
    kind = options.get("dtype", call.args[1] if len(call.args) > 1 else None)
    return on_cuda and (kind is None or source.dotted(kind) in ("torch.float16", "torch.half"))


RULE = Rule("FL010", "float16_without_scaler", Severity.WRONG, __doc__, check)
