"""The optimizer holds other parameters than those of the model that trains.

What:
    After `optimizer = Adam(model.parameters())`, the name `model` gets another module, or one of its layers
    is replaced. Or the loop computes its loss with another model than the one whose parameters the optimizer
    holds.
Why it matters:
    The optimizer keeps the parameters it was given and continues to update the old ones. The new parameters
    get gradients but are never updated. The replaced head of a fine-tuned network stays random.
How to fix it:
    Create the optimizer last. (`model.to(device)` in between is fine: it changes the parameters in place.)
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
  + model[1] = torch.nn.Linear(8, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - model[1] = torch.nn.Linear(8, 10)  # <-
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""

from typing import Any
from weakref import WeakKeyDictionary, ref

from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.diagnose.observed_program import parameters_of

MIN_STEPS = 10
MAX_STEPS = 50  # in which gradients are looked for


class OptimizerOfAnotherModel(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.clock = 0
        self.homes = program.tensor_map()  # parameter -> when it was made, its modules and names there
        self.made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # optimizer -> when
        self.steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.ran: set[int] = set()  # parameters of modules that ran
        self.received: set[int] = set()  # parameters with a gradient in a step of their optimizer
        self.unheld: dict[int, list[Any]] = {}  # others with a gradient -> itself, steps

    def parameter_made(self, module: Any, name: str, parameter: Any) -> None:
        self.clock += 1
        self.homes.setdefault(parameter, [self.clock]).append((ref(module), name))

    def optimizer_made(self, optimizer: Any) -> None:
        self.made[optimizer] = self.clock

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self.ran.update(id(p) for p in module.parameters(recurse=False))

    def step_begins(self, optimizer: Any) -> None:
        self.steps[optimizer] = steps = self.steps.get(optimizer, 0) + 1
        if steps > MAX_STEPS:
            return
        self.received.update(id(p) for p in parameters_of(optimizer) if p.grad is not None)
        held = self.program.optimized()
        for p in (p for root in self.program.roots for p in root.parameters() if p.grad is not None):
            if id(p) not in held and bool(p.grad.any()):
                self.unheld.setdefault(id(p), [ref(p), 0])[1] += 1

    def findings(self) -> Findings:
        held = self.program.optimized()
        left = [(seen(), steps) for key, (seen, steps) in self.unheld.items() if key not in held]
        left = [(p, steps) for p, steps in left if p is not None and steps >= MIN_STEPS]
        for optimizer, steps in self.steps.items() if left else ():
            own, after = list(parameters_of(optimizer)), self.made.get(optimizer, 0)
            if steps < MIN_STEPS:
                continue
            idle = [p for p in own if id(p) not in self.received]
            new = [p for p, _ in left if self.homes.get(p, [0])[0] > after]
            lost = [p for p in idle if p.requires_grad and not self._at_home(p)]
            frozen = not any(p.requires_grad for p in own)
            unused = len(idle) == len(own) and (frozen or not any(id(p) in self.ran for p in own))
            if unused or (lost and new):
                others = [p for p, _ in left] if unused else new
                how = "frozen" if frozen else "in no model that runs"
                yield RULE.finding(
                    f"{len(idle if unused else lost)} of {len(own)} parameters of the optimizer are "
                    f"{how}, and "
                    f"no optimizer holds {len(others)} that get gradients: {self.program.names(others)}",
                    self.program.line_of(optimizer if unused else new[0]),
                    "make the optimizer after the model is complete",
                )

    def _at_home(self, parameter: Any) -> bool:
        """Whether a module that exists has it, or none was ever known."""
        _, *homes = self.homes.get(parameter, [0])
        own = [(home(), name) for home, name in homes]
        return not homes or any(m is not None and m._parameters.get(name) is parameter for m, name in own)


RULE = rule(OptimizerOfAnotherModel, "FL020", __doc__)
