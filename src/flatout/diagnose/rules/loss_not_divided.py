"""An accumulated loss is not divided by the number of batches.

What:
    The gradients of several batches are accumulated before the optimizer steps. The loss (a mean over its
    batch) is not divided by the number of batches.
Why it matters:
    The sum of n means is n times the mean over the larger batch. With SGD, the learning rate is effectively n
    times larger. With Adam, clipping and weight decay act at a different ratio than intended. Changing n then
    silently changes the training.
How to fix it:
    Use `loss = loss / n` before `backward()`, where n is the number of accumulated batches.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
        loss = model(torch.randn(8, 4)).square().mean()
  +     loss = loss / 4
        loss.backward()  # <-
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
Sources:
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.zero_grad_in_window import window, window_test
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.windows import size_of
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions(
        "accumulate", "Accelerator", "Fabric", "div_", "mul_"
    ):  # they may divide out of sight
        return
    if any(
        node.arg == "reduction" and isinstance(node.value, ast.Constant) and node.value.value == "sum"
        for _, node in program.nodes(ast.keyword)
        if isinstance(node, ast.keyword)
    ):
        return
    for loop in program.step_loops:
        steps, passes = loop.of("step", "scaler_step"), loop.of("backward")
        gate = window(loop, steps[0]) if len(steps) == 1 else None
        test = window_test(loop, steps[0]) if gate is not None else None
        if (
            gate is None
            or test is None
            or len(passes) != 1
            or not loop.always(passes[0])
            or passes[0].subject is None
        ):
            continue
        if not any(
            (gate, "body") in [(node, arm) for node, arm, _ in zero.arms] for zero in loop.of("zero_grad")
        ):
            continue
        source, loss = passes[0].source, passes[0].subject
        if not scaled_down(source, loss):
            by = size_of(test)
            name = source.code(loss)
            yield RULE.finding(
                f"the gradients of several batches are accumulated until line {gate.lineno}, but `{name}` is not divided by their number",
                passes[0].place,
                f"({name} / {by}).backward()",
                others=[steps[0].place],
            )


def scaled_down(source: SourceFile, loss: ast.AST, depth: int = 0) -> bool:
    """Return whether a loss is divided or multiplied on its way, or its origin is not visible."""
    if any(isinstance(node, (ast.Div, ast.Mult, ast.FloorDiv)) for node in ast.walk(loss)) or depth > 6:
        return True
    names = [node for node in ast.walk(loss) if isinstance(node, ast.Name)]
    if isinstance(loss, ast.Name):
        bindings = source.names.reaching(loss)
        return not bindings or any(
            b.how == "parameter"
            or (isinstance(b.node, ast.AugAssign) and isinstance(b.node.op, (ast.Div, ast.Mult)))
            or (b.value is not None and scaled_down(source, b.value, depth + 1))
            for b in bindings
        )
    if isinstance(loss, ast.Call):
        return any("sum" in getattr(node, "attr", "") for node in ast.walk(loss.func))
    return any(scaled_down(source, name, depth + 1) for name in names)


RULE = Rule("FL005", "loss_not_divided", Severity.WRONG, __doc__, check)
