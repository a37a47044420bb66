"""The optimizer steps before the gradients are computed.

What:
    In a training step, `zero_grad()` is followed by `step()`, and `backward()` comes last.
Why it matters:
    The optimizer step uses cleared gradients. The gradients that `backward()` computes afterwards are cleared
    again before the next step. The model learns nothing.
How to fix it:
    Use the order `zero_grad`, forward, `backward`, `step`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
  +     loss.backward()
        optimizer.step()  # <-
  -     loss.backward()
"""

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        steps = loop.of("step", "scaler_step")
        zeros = loop.of("zero_grad")
        if (
            not loop.one_optimizer(program)
            or not zeros
            or not all(loop.always(event) for event in [*steps, *zeros, *loop.of("backward")])
        ):
            continue
        order = [event for event in loop.events if event in steps or event.kind in ("backward", "zero_grad")]
        first = next(event for event in order if event in steps)
        at = order.index(first)
        if all(event.kind != "backward" for event in order[:at]) and order[at - 1].kind == "zero_grad":
            yield RULE.finding(
                "the optimizer steps before the backward pass, with gradients that were just cleared",
                first.place,
                f"{first.source.code(first.node)}  # after the backward pass",
                others=[loop.of("backward")[0].place],
            )


RULE = Rule("FL006", "step_before_backward", Severity.WRONG, __doc__, check)
