"""The random generator is reset in every pass of the training loop.

What:
    `torch.manual_seed(...)` with a constant runs inside the training loop, or in the loop over epochs.
Why it matters:
    Dropout masks, noise and the order of the data restart from the same point. The "random" numbers are the
    same in every epoch or every step.
How to fix it:
    Seed once, before the loops. To make each pass repeatable on its own, seed with the pass:
    `torch.manual_seed(seed + epoch)`.
Example:
    import torch

  + torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
  -     torch.manual_seed(0)  # <-
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import StepLoop
from flatout.schema.findings import Finding, Severity

SEEDS = (
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
)


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in [*loop.around, *loop.events]:
            if (
                event.kind == "call"
                and isinstance(event.node, ast.Call)
                and event.source.dotted(event.node.func) in SEEDS
                and event.node.args
                and isinstance(event.node.args[0], ast.Constant)
                and not _new_run(program, loop, event.loops[-1].node)
            ):
                yield RULE.finding(
                    f"`{event.source.code(event.node)}` resets the random numbers in every pass of the loop",
                    event.place,
                    f"{event.source.code(event.node)}  # once, before the loops",
                )


def _new_run(program: ScriptProgram, loop: StepLoop, around: ast.AST) -> bool:
    """Return whether each pass creates a model or optimizer: a separate training (a fold, a setting)."""
    return any(
        event.kind == "call"
        and any(each.node is around for each in event.loops)
        and {"Optimizer", "Module"} & program.values.kinds(event.source, event.node)
        and isinstance(event.node, ast.Call)
        and program.origins(event.source, event.node)[0].node is event.node
        and "Tensor" not in program.values.kinds(event.source, event.node)
        for event in [*loop.around, *loop.events]
    )


RULE = Rule("FL026", "seed_in_the_loop", Severity.WRONG, __doc__, check)
