"""Gradients are cleared outside the loop that steps.

What:
    `zero_grad()` is in the loop over epochs or before all loops, but `optimizer.step()` is in the loop over
    batches.
Why it matters:
    `backward()` adds to `.grad`. Within an epoch, every step follows the sum of the gradients of all batches
    so far.
How to fix it:
    Move `optimizer.zero_grad()` into the loop that steps.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(10):
  -     optimizer.zero_grad()  # <-
        for _ in range(100):
  +         optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
"""

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.zero_grad_missing import uncleared
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop, step in uncleared(program):
        zeros = [
            event
            for event in [*loop.around, *loop.apart]
            if event.kind == "zero_grad" and loop.zeroes(program, event, step) is not False
        ]
        if zeros:
            where = "once for every pass of the outer loop" if zeros[0].loops else "once, before the loop"
            call = zeros[0].source.code(zeros[0].node)
            yield RULE.finding(
                f"the gradients are cleared {where}, but `{step.source.code(step.node)}` on line {step.place.line} runs in every pass "
                "of the inner one and uses their sum",
                zeros[0].place,
                f"{call}  # inside the loop that steps",
                others=[step.place],
            )


RULE = Rule("FL002", "zero_grad_outside", Severity.WRONG, __doc__, check)
