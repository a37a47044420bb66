"""A number is copied to the device in every step.

What:
    `torch.tensor(0.0, device=device)` or `x.new_tensor(1.0)` is in the training loop or in `forward`.
Why it matters:
    `torch.tensor` puts the number into the memory of the host, and copies it to the device. This copy waits until
    the device has finished all queued work. The device then idles until the host has queued more. (On a CPU it
    costs nothing.)
How to fix it:
    Let the device write it: `torch.zeros((), device=device)`, or `torch.full((), value, device=device)`. Or create
    the tensor once, before the loop.
Example:
    import torch

    device = torch.device("cuda")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
  -     loss = torch.tensor(0.0, device=device)  # <-
  +     loss = torch.zeros((), device=device)
        for x in torch.randn(2, 8, 4, device=device):
            loss = loss + model(x).square().mean()
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

MAKERS = ("torch.tensor", "torch.as_tensor")


def check(program: ScriptProgram) -> Iterator[Finding]:
    seen: set[int] = set()
    for source, call in _often(program):
        number = _number(call)
        if id(call) in seen or number is None:
            continue
        seen.add(id(call))
        device = next((k.value for k in call.keywords if k.arg == "device"), None)
        on_host = isinstance(device, ast.Constant) and str(device.value) in ("None", "cpu")
        if source.dotted(call.func) in MAKERS and device is not None and not on_host:
            where = f"device={source.code(device)}"
        elif getattr(call.func, "attr", "") == "new_tensor" and not source.dotted(call.func):
            where = f"device={source.code(call.func.value)}.device"  # type: ignore[attr-defined]
        else:
            continue
        kind = "".join(f", {k.arg}={source.code(k.value)}" for k in call.keywords if k.arg != "device")
        shape = "(1,)" if isinstance(call.args[0], ast.List) else "()"
        made = f"torch.zeros({shape}" if number == 0 else f"torch.full({shape}, {number:g}"
        yield RULE.finding(
            f"`{source.code(call)}` copies a number to the device in every step, and waits for all queued work",
            source.place(call),
            f"{made}{kind}, {where})",
        )


def _number(call: ast.Call) -> float | None:
    """Return the number that a call turns into a tensor; None if it is anything else."""
    value = call.args[0] if call.args else None
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        value = value.operand
    if isinstance(value, ast.List) and len(value.elts) == 1:
        value = value.elts[0]
    number = value.value if isinstance(value, ast.Constant) else None
    return float(number) if isinstance(number, (int, float)) else None


def _often(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.Call]]:
    """Yield the calls of every training step."""
    for loop in program.steps:
        for event in loop.of("call"):
            if isinstance(event.node, ast.Call) and loop.steady(event):
                yield event.source, event.node
    for source, klass in program.modules_defined():
        for method in klass.body:
            if isinstance(method, ast.FunctionDef) and method.name == "forward":
                yield from (
                    (source, call)
                    for call in ast.walk(method)
                    if isinstance(call, ast.Call) and _always(source, call, method)
                )


def _always(source: SourceFile, call: ast.Call, function: ast.AST) -> bool:
    """Return whether a call runs each time its function does."""
    for around in source.parents(call):
        if around is function:
            return True
        if isinstance(
            around, (ast.If, ast.IfExp, ast.Lambda, ast.FunctionDef, ast.ExceptHandler, ast.Assert)
        ):
            return False
    return False


RULE = Rule("FL122", "number_copied_to_device", Severity.TIME, __doc__, check)
