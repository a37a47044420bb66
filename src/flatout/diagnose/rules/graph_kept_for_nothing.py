"""The graph is kept after its only backward pass.

What:
    `loss.backward(retain_graph=True)` is the only backward pass of the loop, and the graph is not used again.
Why it matters:
    All activations stay in memory until the loss is reassigned. The forward pass of the next step needs its
    memory in addition.
How to fix it:
    Remove `retain_graph=True`. If PyTorch then raises "Trying to backward through the graph a second time",
    this step uses a tensor of the last one. Find that tensor (a hidden state, a running loss) and detach it.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
  -     loss.backward(retain_graph=True)  # <-
  +     loss.backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import remove_argument
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.value_paths import is_given
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        passes = loop.of("backward")
        calls = [event for event in loop.of("call") if isinstance(event.node, ast.Call)]
        again = any(
            event.source.dotted(event.node.func).startswith("torch.autograd.")
            for event in calls
            if isinstance(event.node, ast.Call)
        )
        if (
            len(passes) != 1
            or again
            or _carried(loop)
            or not isinstance(passes[0].node, ast.Call)
            or passes[0].loops[-1] is not loop.loop
        ):
            continue
        call = passes[0].node
        if is_given(call, "retain_graph", True):
            kept = [k for k in call.keywords if k.arg != "retain_graph"]
            shown = ast.unparse(ast.Call(call.func, call.args, kept))
            yield RULE.finding(
                "this is the only backward pass of the loop, and it keeps the whole graph for a second one",
                passes[0].place,
                shown,
                edits=remove_argument(passes[0].source, call, "retain_graph")
                if _made_in_the_step(program, passes[0])
                else [],
            )


def _made_in_the_step(program: ScriptProgram, backward: ProgramEvent) -> bool:
    """Return whether known calls compute the loss; an unknown object may keep a part of its graph."""
    source, loss = backward.source, backward.subject
    if not isinstance(loss, ast.Name):
        return loss is not None
    for origin in program.origins(source, loss):
        call, home = origin.node, origin.source
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and not origin.dotted.startswith("torch.")
        ):
            known = {"Module", "function"} & program.values.kinds(home, call.func)
            if (
                not known
                and not program.functions_called(home, call)
                and "Tensor" not in program.values.kinds(home, call)
            ):
                return False
    return True


def _carried(loop: StepLoop) -> bool:
    """Return whether a module's output feeds its next call: the graph is then needed until it is detached."""
    for event in loop.of("assign"):
        node = event.node
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            given = {
                ast.unparse(target)
                for each in node.targets
                for target in ast.walk(each)
                if isinstance(target, (ast.Name, ast.Attribute))
            }
            taken = {
                ast.unparse(each)
                for argument in node.value.args
                for each in ast.walk(argument)
                if isinstance(each, (ast.Name, ast.Attribute))
            }
            if given & taken and not event.source.dotted(node.value.func):
                return True
    return False


RULE = Rule("FL203", "graph_kept_for_nothing", Severity.MEMORY, __doc__, check, fix_changes="")
