"""The best weights are kept without a copy.

What:
    A `state_dict()` is kept while training goes on. Later it is loaded or saved as the state of that time.
Why it matters:
    `state_dict()` returns the live tensors, and every later step changes them. The program loads the last
    weights, not the best. Early stopping and "keep the best" have no effect.
How to fix it:
    Use `copy.deepcopy(model.state_dict())`, or save the state to a file immediately.
Example:
  + import copy
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best, kept = float("inf"), None
    for size in (3, 2, 1, 2, 3, 4):
        optimizer.zero_grad()
        loss = model(size * torch.randn(64, 4)).square().mean()
        loss.backward()
        optimizer.step()
        if loss.item() < best:
  -         best, kept = loss.item(), model.state_dict()  # <-
  +         best, kept = loss.item(), copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
    ("best_model_state = model.state_dict() returns a reference")
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, counted, line_here, rule

MAX_TAKES = 1 << 16


@dataclass
class LiveTensor:
    """One tensor of what `state_dict()` returned, as it was then."""

    step: int
    key: Any  # the line that took it, the id of its parameter
    version: int
    used: bool = False


@dataclass
class Takes:
    """The tensors of one parameter that one line took."""

    last: LiveTensor
    unused: bool = False  # one before the last was never used
    gap: int = 1 << 60  # the fewest steps between two


class LiveStates(Invariant):
    """Knows the tensors of each `state_dict()`, and what has changed them since."""

    calls = frozenset({"detach"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.taken = program.tensor_map()
        self.takes: dict[Any, Takes] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if isinstance(args[0], self.program.torch.nn.Parameter):
            step, key = self.program.steps, (line_here(), id(args[0]))
            live, takes = LiveTensor(step, key, result._version), self.takes.get(key)
            if takes is None:
                if len(self.takes) >= MAX_TAKES:
                    return
                self.takes[key] = Takes(live)
            elif takes.last.step != step:
                takes.unused |= not takes.last.used
                takes.gap, takes.last = min(takes.gap, step - takes.last.step), live
            self.taken[result] = live

    def changed(self, value: Any, own: set[int]) -> list[tuple[LiveTensor, int]]:
        """The live tensors in a value that were changed since they were taken, and how often.

        ``own``: the ids of the parameters that this value was just copied into, which is no change of it."""
        from torch.utils._pytree import tree_leaves

        found = []
        for leaf in tree_leaves(value):
            live = self.taken.get(leaf) if isinstance(leaf, self.program.torch.Tensor) else None
            if live is not None:
                live.used = True
                if (changes := leaf._version - live.version - (live.key[1] in own)) > 0:
                    found.append((live, changes))
        return found


class BestWeightsNotCopied(LiveStates):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.stepped: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # optimizer -> its latest step
        self.lines: dict[Line | None, tuple[int, int]] = {}  # -> steps until the state was used, changes

    def step_ends(self, optimizer: Any) -> None:
        self.stepped[optimizer] = self.program.steps

    def state_loaded(self, module: Any, state: Mapping[str, Any], strict: bool, result: Any) -> None:
        self._use(state, {id(p) for p in module.parameters()})

    def saved(self, saved: Any, file: Any) -> None:
        self._use(saved, set())

    def _use(self, value: Any, own: set[int]) -> None:
        trained = {
            id(p): last for o, last in self.stepped.items() for g in o.param_groups for p in g["params"]
        }
        for live, changes in self.changed(value, own):
            takes, steps = self.takes[live.key], self.program.steps - live.step
            # others may read a live state on purpose: this one replaced another, and outlived its next turn
            outlived = takes.unused and takes.last.step == live.step and 2 * steps >= 3 * takes.gap
            if trained.get(live.key[1], 0) > live.step and (outlived or live.key[1] in own):
                self.lines[live.key[0]] = steps, changes

    def findings(self) -> Findings:
        for line, (steps, changes) in self.lines.items():
            yield RULE.finding(
                f"this state was used {counted(steps, 'step')} later, but it holds the live weights: they have changed "
                f"{counted(changes, 'time')} since",
                line,
                "copy.deepcopy(model.state_dict())",
            )


RULE = rule(BestWeightsNotCopied, "FL032", __doc__)
