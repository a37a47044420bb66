"""The optimizer has a parameter group for each parameter.

What:
    The groups come from a loop over the parameters, with one parameter in each group.
Why it matters:
    A fused or foreach optimizer updates the tensors of a group together. With one tensor a group, it launches
    as many kernels as a loop over the parameters. Hundreds of groups also make schedulers and `zero_grad`
    slower.
How to fix it:
    Collect parameters with the same options in one group: those with weight decay and those without, or one
    group per learning rate.
Example:
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(20)])
  - groups = []
  - for name, value in model.named_parameters():
  -     groups += [{"params": [value], "weight_decay": 0.0 if "bias" in name else 0.01}]
  + biases = [value for name, value in model.named_parameters() if "bias" in name]
  + weights = [value for name, value in model.named_parameters() if "bias" not in name]
  + groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]
  - optimizer = torch.optim.AdamW(groups, lr=1e-3)  # <-
  + optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/optim.html#per-parameter-options
"""

from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.schema.findings import Severity

MIN_GROUPS = 32


class GroupForEachParameter(Invariant):
    def findings(self) -> Findings:
        for optimizer in self.program.optimizers:
            groups = optimizer.param_groups
            options = {
                repr(sorted((name, value) for name, value in group.items() if name != "params"))
                for group in groups
            }
            if (
                len(groups) >= MIN_GROUPS
                and len(options) <= len(groups) // 8
                and all(len(group["params"]) == 1 for group in groups)
            ):
                yield RULE.finding(
                    f"the {len(groups)} parameter groups hold one parameter each, with {len(options)} different options: a "
                    "fused step launches kernels for each group",
                    self.program.line_of(optimizer),
                    "put parameters with the same options into one group",
                )


RULE = rule(GroupForEachParameter, "FL119", __doc__, Severity.TIME)
