"""Parameters are trained by no optimizer, since their module is not registered.

What:
    Layers run inside a module and receive gradients, but they are not part of `module.parameters()`, so no optimizer
    holds them: they are kept in a Python list or dict, or made in `forward`.
Why it matters:
    Modules in a list are not registered. `parameters()` omits them, so they are never trained. `to(device)`
    leaves them on the CPU, `state_dict()` does not save them, and `eval()` does not affect them.
How to fix it:
    Use `torch.nn.ModuleList([...])` or `torch.nn.ModuleDict({...})`.
Example:
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(4, 1)
  -         self.layers = [torch.nn.Linear(4, 4) for _ in range(3)]  # <-
  +         self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.last(x)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in torch.randn(12, 8, 4):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.ModuleList.html
"""

import weakref
from typing import Any

from flatout.diagnose.invariant import Findings, Invariant, rule

MIN_STEPS = 3


class UnregisteredLayers(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.root: Any = None  # in its forward pass
        self.own: set[int] = set()  # its modules
        self.inside: dict[
            int, Any
        ] = {}  # parameter of an unregistered module -> the name of the root's class
        self.steps: dict[
            int, tuple[weakref.ref[Any], int]
        ] = {}  # parameter -> itself, and its steps with a gradient

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if self.program.forward_depth == 1:
            self.root, self.own = module, {id(m) for m in module.modules()}
        elif id(module) not in self.own and self.program.torch.is_grad_enabled():
            for parameter in module.parameters():
                self.inside[id(parameter)] = type(self.root).__name__

    def step_begins(self, optimizer: Any) -> None:
        if self.inside:
            for parameter in self.program.parameters:
                if id(parameter) in self.inside and parameter.grad is not None:
                    ref, steps = self.steps.get(id(parameter), (None, 0))
                    same = ref is not None and ref() is parameter
                    self.steps[id(parameter)] = weakref.ref(parameter), steps + 1 if same else 1

    def findings(self) -> Findings:
        optimized, lines = self.program.optimized(), dict[Any, list[Any]]()
        for parameter in self.program.parameters:
            key = id(parameter)
            ref, steps = self.steps.get(key, (None, 0))
            trained = ref is not None and ref() is parameter and steps >= MIN_STEPS
            if key in self.inside and trained and key not in optimized:
                lines.setdefault(self.program.line_of(parameter), []).append(parameter)
        for line, parameters in lines.items():
            root = self.inside[id(parameters[0])]
            yield RULE.finding(
                f"{len(parameters)} parameters run inside {root} and receive gradients, but they are not in its "
                f"parameters(), and no optimizer holds them: {self.program.names(parameters)}",
                line,
                "keep the layers in torch.nn.ModuleList([...]) or torch.nn.ModuleDict({...})",
            )


RULE = rule(UnregisteredLayers, "FL021", __doc__)
