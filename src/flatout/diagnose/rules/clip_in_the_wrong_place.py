"""Gradients are clipped too late or too early.

What:
    `clip_grad_norm_` or `clip_grad_value_` comes after `optimizer.step()`, or before `loss.backward()`.
Why it matters:
    Clipping changes `.grad` in place. After the step, nothing reads `.grad` any more. Before the backward
    pass, it is empty. The gradients stay unclipped, and the protection from exploding gradients has no
    effect.
How to fix it:
    Clip between `backward()` and `step()`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
  +     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
  -     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-
"""

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import together
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for clip in loop.of("clip"):
            order = [
                event
                for event in loop.events
                if event is clip
                or (event.kind in ("backward", "step", "scaler_step") and together(event, clip))
            ]
            at = order.index(clip)
            before, after = [event.kind for event in order[:at]], [event.kind for event in order[at + 1 :]]
            name = clip.source.code(clip.node)
            if before and before[-1] != "backward" and not {"step", "scaler_step"} & set(after):
                yield RULE.finding(
                    f"the gradients are clipped after the step on line {order[at - 1].place.line} has used them: this has no effect",
                    clip.place,
                    f"{name}  # before {order[at - 1].source.code(order[at - 1].node)}",
                    others=[order[at - 1].place],
                )
            elif not before and after[:1] == ["backward"]:
                yield RULE.finding(
                    f"the gradients are clipped before the backward pass on line {order[at + 1].place.line} computes them: this has no effect",
                    clip.place,
                    f"{name}  # after {order[at + 1].source.code(order[at + 1].node)}",
                    others=[order[at + 1].place],
                )


RULE = Rule("FL007", "clip_in_the_wrong_place", Severity.WRONG, __doc__, check)
