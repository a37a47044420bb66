"""The running statistics of a frozen network move.

What:
    All parameters of a network or of one of its parts are frozen, but it runs in training mode: its batch
    normalisation keeps changing its running mean and variance.
Why it matters:
    The frozen part is another function in every step. After training, in evaluation mode, it uses
    statistics of the new data and differs from the pretrained network that it should be.
How to fix it:
    Call `eval()` on the frozen part after each `model.train()`.
Example:
    import torch

    body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).requires_grad_(False)
    model = torch.nn.Sequential(body, torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
  - model.train()  # <-
  + model.train()
  + body.eval()
    for x in torch.randn(30, 8, 4) + 2:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_STEPS = 20
MIN_SHIFT = 0.1  # standard deviations


class FrozenStatisticsMove(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: WeakKeyDictionary[Any, Any] = (
            WeakKeyDictionary()
        )  # a normalisation -> where its mode was set
        # -> its first mean and weights, steps in which it ran, line; None if its weights moved
        self.norms: WeakKeyDictionary[Any, list[Any] | None] = WeakKeyDictionary()

    def mode_set(self, module: Any, training: bool) -> None:
        if training and self._is_norm(module):
            self.lines[module] = line_here()

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if (
            not self._is_norm(module)
            or not module.training
            or module.weight is None
            or module.running_mean is None
        ):
            return
        entry = self.norms.setdefault(
            module, [module.running_mean.clone(), module.weight.clone(), set(), line_here()]
        )
        if module.weight.requires_grad or (entry and not self.program.torch.equal(entry[1], module.weight)):
            self.norms[module] = None
        elif entry and len(entry[2]) < MIN_STEPS:
            entry[2].add(self.program.steps)

    def _is_norm(self, module: Any) -> bool:
        return isinstance(module, self.program.torch.nn.modules.batchnorm._BatchNorm)

    def findings(self) -> Findings:
        moved: dict[Any, list[str]] = {}
        for root in self.program.roots:
            names = {module: name for name, module in root.named_modules()}
            for norm, entry in self.norms.items():
                if entry is None or norm not in names or len(entry[2]) < MIN_STEPS:
                    continue
                parent = root.get_submodule(names[norm].rpartition(".")[0])
                around, own = list(parent.parameters()), list(norm.parameters())
                frozen = len(around) > len(own) and not any(p.requires_grad for p in around)
                shift = (norm.running_mean - entry[0]).abs() / (norm.running_var + norm.eps).sqrt()
                if frozen and float(shift.max()) > MIN_SHIFT:
                    moved.setdefault(self.lines.get(norm, entry[3]), []).append(names[norm])
        for line, names_moved in moved.items():
            yield RULE.finding(
                f"the running statistics of {len(names_moved)} frozen batch normalisations moved in "
                "training mode, with all "
                f"parameters around them frozen: {', '.join(names_moved[:3])}",
                line,
                "eval() on the frozen part, after train()",
            )


RULE = rule(FrozenStatisticsMove, "FL078", __doc__)
