"""Parameters of the optimizer never receive a gradient.

What:
    Modules ran in many training steps, and the optimizer holds their parameters, but no backward pass reached them.
Why it matters:
    These parameters keep their initial values. The model trains without them, and no error says so.
How to fix it:
    Use the module's output in the loss, without `detach()`, `.data` or `no_grad()`. Call
    `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`: the reentrant kind computes no gradients if
    none of its inputs requires one. Freeze what should not be trained: `parameter.requires_grad_(False)`.
Example:
    import torch
    from torch.utils.checkpoint import checkpoint

    block, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.1)
    for x in torch.randn(60, 8, 4):
        optimizer.zero_grad()
  -     hidden = checkpoint(block, x, use_reentrant=True)  # <-
  +     hidden = checkpoint(block, x, use_reentrant=False)
        head(hidden).mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/checkpoint.html
"""

import sys
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import user_line
from flatout.diagnose.invariant import Findings, Invariant, counted, rule
from flatout.diagnose.observed_program import parameters_of

MIN_STEPS = 50


class NoGradient(Invariant):
    """A step changes each parameter with a gradient, and so its version: one that keeps its version had none."""

    in_run = True

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.ran: dict[
            int, tuple[Any, str]
        ] = {}  # parameter -> line of its module's call, and why it has no graph
        # optimizer -> its steps, all steps before, and its parameters' versions after the first one
        self.held: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if module.training and (own := list(module.parameters(recurse=False))):
            why = "" if self.program.torch.is_grad_enabled() else no_graph_because(sys._getframe(1))
            self.ran.update({id(p): (user_line(sys._getframe(1)), why) for p in own})

    def step_ends(self, optimizer: Any) -> None:
        entry = self.held.get(optimizer)
        if entry is None:
            versions = {id(p): p._version for p in parameters_of(optimizer)}
            self.held[optimizer] = [1, self.program.steps, versions]
        else:
            entry[0] += 1

    def findings(self) -> Findings:
        for optimizer, (counted_steps, before, versions) in self.held.items():
            steps = self.program.steps - before if self.program.in_run else counted_steps
            parameters, groups = list(parameters_of(optimizer)), dict[Any, list[Any]]()
            still = [
                p for p in parameters if versions.get(id(p)) == p._version and p.requires_grad and p.numel()
            ]
            if steps < MIN_STEPS or len(still) == len(parameters):
                continue
            for p in still:
                if p.grad is None and (id(p) in self.ran or self.program.in_run):
                    line, why = self.ran.get(id(p), (None, ""))
                    groups.setdefault((line if why else self.program.line_of(p), why), []).append(p)
            for (line, why), members in groups.items():
                yield RULE.finding(
                    f"{len(members)} of {counted(len(parameters), 'parameter')} got no gradient in {steps} steps: "
                    f"{self.program.names(members)}. {why or 'The loss does not depend on them'}",
                    line,
                    "use_reentrant=False"
                    if "reentrant" in why
                    else "let the loss depend on them, or freeze them",
                )


def no_graph_because(frame: Any) -> str:
    """Why gradients are off while a module runs in a training step."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return (
                "checkpoint(use_reentrant=True) computes no gradients, since none of its inputs requires one"
            )
        frame = frame.f_back
    return "Their module ran without gradients (no_grad)"


RULE = rule(NoGradient, "FL060", __doc__)
