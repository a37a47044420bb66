"""An invariant: a fact of correct training, held against what a running program does.

`flatout.diagnose.observer` makes one instance of each per process, and calls the methods that a class overrides.
A finding must be certain from what was observed: without certainty an invariant stays silent. The source is read
only to name a line.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.agent.frames import Line, place_of, user_line
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from flatout.diagnose.observed_program import ObservedProgram
    from flatout.schema.findings import SourceLocation

Findings = Iterable[Finding]


@dataclass
class Clip:
    """A call of ``clip_grad_norm_`` or ``clip_grad_value_``. The properties read the present gradients."""

    line: Line | None
    given: Any  # the first argument
    parameters: list[Tensor]
    limit: float
    total: Any  # the norm before; None if values are clipped

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def changed(self) -> bool:
        if self.total is not None:
            return float(self.total) > self.limit
        return any(bool((gradient.abs() >= self.limit).any()) for gradient in self.gradients)

    @property
    def norm(self) -> float:
        return math.sqrt(sum(float(gradient.float().norm()) ** 2 for gradient in self.gradients))


class Invariant:
    """Observes one program. ``calls``: the names of the torch functions and methods that `called` gets; with dots, of a
    function in Python, such as ``torch.load``, whose arguments come by position.

    ``in_run``: it also watches the first steps of `flatout run`, where each event that it uses must cost nothing
    measurable; there the program is not asked for its forward passes."""

    calls: ClassVar[frozenset[str]] = frozenset()
    in_run: ClassVar[bool] = False

    def __init__(self, program: ObservedProgram) -> None:
        self.program = program

    # -- events, in the process of the program

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        """A function of ``calls`` has returned. Calls within torch's own functions are not seen.

        What this returns replaces the result; None keeps it."""

    def forward_begins(self, module: Module, inputs: tuple[Any, ...]) -> None:
        """A module runs: a root module, or one inside another."""

    def forward_ends(self, module: Module, output: Any) -> None: ...

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None: ...

    def backward_ends(self) -> None: ...

    def parameter_made(self, module: Module, name: str, parameter: Tensor) -> None:
        """A module registers a parameter."""

    def mode_set(self, module: Module, training: bool) -> None:
        """``train()`` or ``eval()`` of a module, not of its children."""

    def state_loaded(self, module: Module, state: Mapping[str, Any], strict: bool, result: Any) -> None: ...

    def saved(self, saved: Any, file: Any) -> None:
        """``torch.save`` has returned."""

    def optimizer_made(self, optimizer: Optimizer) -> None: ...

    def optimizer_loaded(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None: ...

    def step_begins(self, optimizer: Optimizer) -> None: ...

    def step_ends(self, optimizer: Optimizer) -> None: ...

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        """``zero_grad`` of an optimizer or of a module has returned."""

    def gradients_clipped(self, clip: Clip) -> None: ...

    def scheduler_stepped(self, scheduler: Any) -> None: ...

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None: ...

    def gradients_unscaled(self, scaler: Any, optimizer: Optimizer) -> None: ...

    def scaler_stepped(self, scaler: Any, optimizer: Optimizer) -> None: ...

    def scaler_updated(self, scaler: Any) -> None: ...

    def seeded(self, seed: Any) -> None:
        """``torch.manual_seed`` has returned."""

    def subset_made(self, subset: Any) -> None: ...

    def pass_begins(self, loader: DataLoader) -> None:
        """A pass over a DataLoader begins."""

    def batch(self, loader: DataLoader, batch: Any, indices: Any) -> None:
        """A loader returned a batch. ``indices``: of its samples; None if they are unknown."""

    def pass_ends(self, loader: DataLoader) -> None:
        """A loader is exhausted."""

    def reduced(self, name: str, tensor: Tensor) -> None:
        """A collective such as ``all_reduce`` has changed this tensor."""

    # -- the conclusion

    def findings(self) -> Findings:
        """What is certain from all that was observed so far. May be called several times."""
        return ()


def rule(
    kind: type[Invariant], code: str, page: str, severity: Severity = Severity.WRONG, **fields: Any
) -> Rule:
    """The rule of an invariant, named after its file. ``fields`` are further fields of the rule."""
    return Rule(code, kind.__module__.rpartition(".")[2], severity, page, invariant=kind, **fields)


def line_here() -> Line | None:
    """The user's line that is being executed."""
    return user_line(sys._getframe(1))


def place_here() -> SourceLocation | None:
    return place_of(line_here())


def argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None
) -> Any:
    """An argument of a call, by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def digest(value: Any) -> str:
    """A digest of the tensors in a batch, or of its text."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [leaf.detach().cpu() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    data = [t.flatten().clone().view(torch.uint8).numpy().tobytes() for t in tensors if t.numel()]
    return hashlib.blake2b(b"".join(data) or repr(value).encode(), digest_size=8).hexdigest()


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
