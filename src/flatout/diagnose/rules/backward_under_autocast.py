"""The backward pass runs inside autocast.

What:
    `loss.backward()` stands inside the `with torch.autocast(...)` of the forward pass.
Why it matters:
    Backward operations take the types of their forward operations by themselves. Inside the block, what is done beside them (custom
    autograd functions, hooks, gradient penalties) is cast a second time. PyTorch's documentation advises against it.
How to mend it:
    End the block after the loss: forward and loss inside, `backward()` and `step()` outside.
Bad:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()  # <-
        optimizer.step()
Good:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/amp.html ("Backward passes under autocast are not recommended")
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.bce_under_autocast import under_autocast
from flatout.plan.findings import Finding, Severity
from flatout.probe.program import Program


def look(program: Program) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in loop.of("backward"):
            if under_autocast(event):
                yield RULE.finding("the backward pass runs inside the autocast block of the forward pass", event.place,
                                   f"{event.source.code(event.node)}  # outside the block")


RULE = Rule("FL309", "backward_under_autocast", Severity.FRAGILE, __doc__, look=look)
