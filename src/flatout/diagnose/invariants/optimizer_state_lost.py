"""The optimizer's state is loaded, and then the optimizer is created again.

What:
    `optimizer.load_state_dict(...)` runs before the statement that creates the optimizer for the training.
Why it matters:
    The loaded state is lost without an error: momentum and the statistics of Adam start at zero, and the learning
    rate starts at its first value. After every resume, the loss rises for a while.
How to fix it:
    Load the state after the optimizer is created. If the checkpoint is read earlier, keep its state until then.
Example:
    import torch

    class Trainer:
        def __init__(self, model, saved=None):
            self.model, self.saved = model, saved
            self.optimizer = torch.optim.Adam(model.parameters())
  -         if saved is not None:
  -             self.optimizer.load_state_dict(saved)  # <-

        def train(self, batches):
            self.optimizer = torch.optim.Adam(self.model.parameters())
  +         if self.saved is not None:
  +             self.optimizer.load_state_dict(self.saved)
            for x in batches:
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()

    model = torch.nn.Linear(4, 1)
    first = Trainer(model)
    first.train(torch.randn(5, 8, 4))
    second = Trainer(model, first.optimizer.state_dict())
    second.train(torch.randn(5, 8, 4))
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_STEPS = 3


@dataclass
class LoadedOptimizer:
    """An optimizer that got a state before it stepped."""

    line: Line | None
    kind: type
    parameters: set[int]
    states: int  # parameters with a state
    later: Any  # optimizers that were made after the load


class OptimizerStateLost(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.loaded: WeakKeyDictionary[Any, LoadedOptimizer] = WeakKeyDictionary()
        self.lost: dict[Line | None, tuple[LoadedOptimizer, int]] = {}

    def optimizer_made(self, optimizer: Any) -> None:
        for loaded in self.loaded.values():
            loaded.later.add(optimizer)

    def optimizer_loaded(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        if state.get("state") and optimizer not in self.steps:
            parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self.loaded[optimizer] = LoadedOptimizer(
                line_here(), type(optimizer), parameters, len(state["state"]), WeakSet()
            )

    def step_ends(self, optimizer: Any) -> None:
        steps = self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if steps < MIN_STEPS or not self.loaded or optimizer in self.loaded:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for other, loaded in self.loaded.items():
            same = loaded.kind is type(optimizer) and loaded.parameters == held
            if same and other not in self.steps and optimizer in loaded.later:
                self.lost[loaded.line] = loaded, steps

    def findings(self) -> Findings:
        for line, (loaded, steps) in self.lost.items():
            yield RULE.finding(
                f"the state of {loaded.states} parameters was loaded into this {loaded.kind.__name__}, but another one, made "
                f"later for the same parameters, takes the steps ({steps} so far): the loaded state is lost",
                line,
                "load the state into the optimizer that trains",
            )


RULE = rule(OptimizerStateLost, "FL041", __doc__)
