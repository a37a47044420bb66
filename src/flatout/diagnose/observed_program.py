"""What is known of an observed program: its parameters, modules, optimizers and loaders, and the lines that made them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import Line, user_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

MAX_KEPT = 64
MAX_DEPTH = 32  # of nested modules, in a name


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


class ObservedProgram:
    """What several invariants ask about the program.

    It keeps the first modules, optimizers, schedulers and loaders alive: a finding may come after their function."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.backwards = 0
        self.steps = 0  # of optimizers
        self.passes = 0  # over loaders that feed backward passes
        self.in_run = False  # a real run, in which forward passes are not observed
        self.forward_depth = 0
        self.evaluated = False  # a forward pass without gradients came after a backward pass
        self.label_digests: list[str] = []  # of the first labels that a loss got
        self.tensor_map: type[Any] = import_module("torch.utils.weak").WeakTensorKeyDictionary
        self.training_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        # parameter -> itself, its module, its name there, and the line that made it
        self._parameters: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Module], str, Line | None]] = {}
        self._parents: weakref.WeakKeyDictionary[Module, tuple[weakref.ref[Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        self._kept: list[Any] = []
        self.made: weakref.WeakKeyDictionary[Any, Line | None] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def parameters(self) -> Iterator[Tensor]:
        """The living parameters of all modules, each once."""
        for ref, *_ in list(self._parameters.values()):
            if (parameter := ref()) is not None:
                yield parameter

    @property
    def roots(self) -> list[Module]:
        """The modules that were called, but not from inside another one."""
        return list(self._roots)

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self._optimizers)

    def optimized(self) -> set[int]:
        """The ids of all parameters that an optimizer holds."""
        return {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}

    def line_of(self, made: object) -> Line | None:
        """The line that made a parameter, an optimizer or a loader."""
        if isinstance(made, self.torch.Tensor):
            entry = self._parameters.get(id(made))
            return entry[3] if entry is not None and entry[0]() is made else None
        return self.made.get(made)

    def name_of(self, parameter: Tensor) -> str:
        """Its name in the outermost module that holds it."""
        entry = self._parameters.get(id(parameter))
        module = entry[1]() if entry is not None and entry[0]() is parameter else None
        if entry is None or module is None:
            return "a tensor"
        names, parent = [entry[2]], self._parents.get(module)
        if parent is None:
            return f"{type(module).__name__}.{entry[2]}"
        while parent is not None and len(names) < MAX_DEPTH:
            names.append(parent[1])
            outer = parent[0]()
            parent = self._parents.get(outer) if outer is not None else None
        return ".".join(reversed(names))

    def names(self, parameters: list[Tensor], most: int = 3) -> str:
        """The names of the first few, such as ``a.weight, a.bias and 4 more``."""
        names = [self.name_of(parameter) for parameter in parameters[:most]]
        more = len(parameters) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def register_parameter(self, module: Module, name: str, parameter: Tensor) -> None:
        if id(parameter) not in self._parameters:
            key, table = id(parameter), self._parameters
            ref = weakref.ref(parameter, lambda _: table.pop(key, None))
            table[key] = ref, weakref.ref(module), name, user_line(sys._getframe(1))

    def register_child(self, parent: Module, name: str, child: Module) -> None:
        self._parents[child] = weakref.ref(parent), name

    def register_made(self, made: Any) -> None:
        self.made.setdefault(made, user_line(sys._getframe(1)))
        self._keep(made)
        if isinstance(made, self.torch.optim.Optimizer):
            self._optimizers.add(made)

    def register_root(self, module: Module) -> None:
        if module not in self._roots:
            self._roots.add(module)
            self._keep(module)

    def _keep(self, value: Any) -> None:
        if len(self._kept) < MAX_KEPT:
            self._kept.append(value)
