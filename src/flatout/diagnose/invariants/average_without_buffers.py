"""An averaged copy of the model keeps its first running statistics.

What:
    A copy of the model follows the parameters of the trained one, but not its buffers, and it is evaluated.
Why it matters:
    Its batch normalisation uses the statistics from the time of the copy, often mean 0 and variance 1. The
    evaluation of the copy is wrong, while training looks healthy.
How to fix it:
    Copy the buffers in each update, or use `torch.optim.swa_utils.AveragedModel(model, use_buffers=True)`.
Example:
    import copy
    import torch

    def network():
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    model = network()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(12, 16, 4) + 3:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.lerp_(fast, 0.1)
  +         for slow, fast in zip(average.buffers(), model.buffers()):
  +             slow.copy_(fast)
    average.eval()
  - average(torch.randn(4, 4))  # <-
  + average(torch.randn(4, 4))
"""

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from flatout.diagnose.invariant import Findings, Invariant, place_here, rule

MIN_STEPS = 5


class AverageWithoutBuffers(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.evaluated: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # -> place
        self.trained: WeakSet[Any] = WeakSet()

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if self.program.forward_depth == 1:
            if module.training and self.program.torch.is_grad_enabled():
                self.trained.add(module)
            elif not module.training and module not in self.evaluated:
                self.evaluated[module] = place_here()

    def findings(self) -> Findings:
        optimized = self.program.optimized()
        for copy, place in self.evaluated.items():
            parameters = list(copy.parameters())
            if copy in self.trained or not parameters or any(id(p) in optimized for p in parameters):
                continue
            for model in self.trained:
                if shapes(model) != shapes(copy):
                    continue
                follows = all(p._version >= MIN_STEPS for p in parameters)
                buffers = dict(model.named_buffers())
                stale = [
                    n
                    for n, b in copy.named_buffers()
                    if is_initial(n, b) and not is_initial(n, buffers.get(n))
                ]
                if follows and stale:
                    yield RULE.finding(
                        f"this copy follows the model's parameters, but {len(stale)} of its buffers still have their initial values "
                        f"({stale[0]}), while the model's running statistics have changed",
                        place,
                        "copy the buffers in each update",
                    )


def is_initial(name: str, buffer: Any) -> bool:
    """Whether these are the running statistics of a new batch normalisation."""
    initial = {"running_mean": 0.0, "running_var": 1.0}.get(name.rpartition(".")[2])
    return initial is not None and buffer is not None and bool((buffer == initial).all())


def shapes(module: Any) -> list[Any]:
    return [(name, p.shape) for name, p in module.named_parameters()]


RULE = rule(AverageWithoutBuffers, "FL063", __doc__)
