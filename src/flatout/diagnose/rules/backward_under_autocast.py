"""The backward pass runs inside autocast.

What:
    `loss.backward()` is inside the `with torch.autocast(...)` block of the forward pass.
Why it matters:
    Backward operations use the types of their forward operations automatically. Inside the block, other
    operations of the backward pass are cast a second time: custom autograd functions, hooks and gradient
    penalties. The PyTorch documentation advises against it.
How to fix it:
    End the block after the loss. Keep the forward pass and the loss inside, and `backward()` and `step()`
    outside.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 4)).square().mean()
  -         loss.backward()  # <-
  +     loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/amp.html ("Backward passes under autocast are not recommended")
"""

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.bce_under_autocast import under_autocast
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in loop.of("backward"):
            if under_autocast(event):
                yield RULE.finding(
                    "the backward pass runs inside the autocast block of the forward pass",
                    event.place,
                    f"{event.source.code(event.node)}  # outside the block",
                )


RULE = Rule("FL309", "backward_under_autocast", Severity.FRAGILE, __doc__, check)
