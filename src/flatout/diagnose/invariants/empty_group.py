"""A parameter group of an optimizer is empty.

What:
    An optimizer was made with several groups of parameters, and one of them holds none.
Why it matters:
    The options of this group, such as no weight decay, act on nothing. Often the names that select its parameters match
    none: `name in ("bias",)` compares whole names, such as `layer.bias`.
How to fix it:
    Select by a part of the name: `any(part in name for part in ("bias", "norm"))`. Or remove the group.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    named = list(model.named_parameters())
  - plain = ["layer.bias"]
  + plain = ["bias"]
    groups = [
        {"params": [p for name, p in named if name not in plain], "weight_decay": 0.01},
        {"params": [p for name, p in named if name in plain], "weight_decay": 0.0},
    ]
  - optimizer = torch.optim.AdamW(groups)  # <-
  + optimizer = torch.optim.AdamW(groups)
    for x in torch.randn(9, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity


class EmptyGroup(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, tuple[int, int, dict[str, Any]]] = {}

    def optimizer_made(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            if not group["params"]:
                others: dict[str, Any] = next((other for other in groups if other["params"]), {})
                own = {
                    name: value
                    for name, value in group.items()
                    if name != "params" and value != others.get(name)
                }
                self.lines[line_here()] = number, len(groups), own

    def findings(self) -> Findings:
        for line, (number, groups, own) in self.lines.items():
            options = ", ".join(f"{name}={value}" for name, value in own.items())
            yield RULE.finding(
                f"group {number + 1} of {groups} holds no parameters{': ' + options + ' acts on nothing' if options else ''}",
                line,
                "select its parameters by a part of the name, or remove the group",
            )


RULE = rule(EmptyGroup, "FL315", __doc__, Severity.FRAGILE)
