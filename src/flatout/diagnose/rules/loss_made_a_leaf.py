"""The loss is cut off from the model and set to require a gradient.

What:
    `backward()` is called on a newly created tensor: `torch.tensor(loss, requires_grad=True)`,
    `Variable(loss.data, requires_grad=True)`, `loss.detach().requires_grad_()`, or
    `loss.requires_grad = True`.
Why it matters:
    This only silences "element 0 of tensors does not require grad". The gradient ends at the new tensor, and
    no parameter gets a gradient. The optimizer changes nothing (or only applies weight decay).
How to fix it:
    Find where the loss left the graph: `.item()`, `.detach()`, `.data`, NumPy, `argmax`, or `torch.no_grad()`
    around the forward pass.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
  -     loss = torch.tensor(loss.item(), requires_grad=True)
        loss.backward()  # <-
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent
from flatout.probe.value_paths import is_given
from flatout.schema.findings import Finding, Severity

MAKES_LEAF = ("torch.tensor", "torch.autograd.Variable", "torch.as_tensor")


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in loop.of("backward"):
            if event.subject is None:
                continue
            origins = program.origins(event.source, event.subject)
            leaf = bool(origins) and all(_is_leaf(origin.source, origin.node) for origin in origins)
            if leaf or _info(event):
                name = event.source.code(event.subject)
                yield RULE.finding(
                    f"`{name}` is cut off from the model and set to require a gradient: no parameter gets a gradient",
                    event.place,
                    f"# call backward() on the loss itself, without item(), detach() or data on the way to `{name}`",
                    others=[origin.source.place(origin.node) for origin in origins if leaf][:1],
                )


def _is_leaf(source: SourceFile, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if is_given(node, "requires_grad", True) and source.dotted(node.func) in MAKES_LEAF:
        return any(isinstance(each, ast.Name) for argument in node.args for each in ast.walk(argument))
    return isinstance(node.func, ast.Attribute) and node.func.attr == "detach"


def _info(backward: ProgramEvent) -> bool:
    """Return whether the function that calls backward sets ``loss.requires_grad = True``."""
    subject = ast.unparse(backward.subject) if backward.subject is not None else ""
    home = backward.frames[-1] if backward.frames else backward.source.tree
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is True
        and ast.unparse(node.targets[0]) == f"{subject}.requires_grad"
        for node in ast.walk(home)
    )


RULE = Rule("FL019", "loss_made_a_leaf", Severity.WRONG, __doc__, check)
