"""Every micro-batch averages the gradients between devices.

What:
    The model is a `DistributedDataParallel`, and several backward passes accumulate gradients before a step.
    `no_sync()` is not used.
Why it matters:
    Every backward pass sends all gradients over the network, but only their sum is needed. With n
    micro-batches, this multiplies the traffic by n.
How to fix it:
    Put `with model.no_sync():` around the forward and backward passes of all micro-batches except the last.
Bad:
    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
        loss = model(torch.randn(8, 4)).square().mean() / 4
        loss.backward()  # <-
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
Good:
    import contextlib

    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
        last = (i + 1) % 4 == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(torch.randn(8, 4)).square().mean() / 4
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.zero_grad_in_window import window
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def look(program: ScriptProgram) -> Iterator[Finding]:
    if not program.mentions("DistributedDataParallel") or program.mentions(
        "no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"
    ):
        return
    for loop in program.step_loops:
        steps, passes = loop.of("step", "scaler_step"), loop.of("backward")
        wrapped = any(
            isinstance(event.node, ast.Call)
            and any(
                origin.dotted.endswith("DistributedDataParallel")
                for origin in program.origins(event.source, event.node.func)
            )
            for event in loop.of("call")
        )
        if (
            wrapped
            and len(steps) == len(passes) == 1
            and window(loop, steps[0]) is not None
            and loop.always(passes[0])
        ):
            yield RULE.finding(
                f"every backward pass averages the gradients between all devices, but the optimizer steps only on line {steps[0].place.line}",
                passes[0].place,
                "with model.no_sync():  # for all micro-batches except the last",
                others=[steps[0].place],
            )


RULE = Rule("FL116", "accumulation_without_no_sync", Severity.TIME, __doc__, look=look)
