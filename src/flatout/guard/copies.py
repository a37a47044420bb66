"""Copies of modules, optimizers and random states, for steps that are run again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.measure.nests import mapped

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import TrainingContext

MAX_OUTPUTS = 6  # most outputs whose gradients are separated
ZERO_SHARE = 1e-3  # share of a gradient that counts as zero after subtracting the module's inner part
OVERFITTING_STEP = 0.02  # how far ``overfit`` moves a weight per update, as a share of its tensor's RMS


class CopiedContext:
    """The training context with copies instead of the live modules and optimizers.

    Everything else comes from the original.
    """

    def __init__(self, context: TrainingContext, roots: list[Any], optimizers: list[Any]) -> None:
        self.context, self.roots, self.optimizers = context, roots, optimizers

    @property
    def parameters(self) -> list[Any]:
        return [p for root in self.roots for p in root.parameters() if p.requires_grad]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)


def to_float64(roots: list[Any], optimizers: list[Any], torch: ModuleType) -> None:
    for root in roots:
        root.double()
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
                if is_float and value.shape == p.shape and value.dim():
                    state[key] = value.double()


def outside_gradients(outputs: list[Any], grads: dict[int, Any], torch: ModuleType) -> dict[int, Any]:
    """The part of each output's gradient that does not come from another output.

    For example, the gradient of logits may come from a loss that the module also returns.
    """
    parts = dict(grads)
    observed = [i for i in sorted(grads) if i < len(outputs) and outputs[i].requires_grad]
    for i in observed if 1 < len(observed) <= MAX_OUTPUTS else ():
        for other in observed:
            inner = (
                torch.autograd.grad(
                    outputs[other], outputs[i], grads[other], retain_graph=True, allow_unused=True
                )[0]
                if other != i
                else None
            )
            if inner is not None and i in parts:
                parts[i] = parts[i] - inner
                if float(parts[i].norm()) <= ZERO_SHARE * float(grads[i].norm()):
                    del parts[i]
    return parts


def squared_norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.double().square().sum())


def norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def tensors_of(roots: list[Any]) -> list[Any]:
    return [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]


def step_sizes(parameters: list[Any]) -> list[float]:
    """The step size of each tensor. A tensor that starts at zero moves as far as the others."""
    sizes = [float(p.detach().double().square().mean().sqrt()) for p in parameters]
    typical = sorted(sizes)[len(sizes) // 2] if sizes else 0.0
    return [OVERFITTING_STEP * max(size, 0.1 * typical) for size in sizes]


def adam(p: Tensor, grad: Tensor, rate: float, moments: list[Any], step: int, torch: ModuleType) -> None:
    """Adam without an optimizer object, which would count as one of the program's."""
    with torch.no_grad():
        moments[0].lerp_(grad, 0.1)
        moments[1].lerp_(grad.square(), 0.05)
        size = (moments[1] / (1 - 0.95**step)).sqrt_().add_(1e-30)
        p.sub_(rate / (1 - 0.9**step) * moments[0] / size)


def deep_copy(value: Any, torch: ModuleType) -> Any:
    """A deep copy. torch copies no tensor with a graph, such as a loss that a module keeps: it is copied without."""
    ledger, original = Ledger(), torch.Tensor.__deepcopy__

    def copy_detached(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if tensor.is_leaf:
            return original(tensor, memo)
        return memo.setdefault(id(tensor), tensor.detach().clone())

    ledger.set(torch.Tensor, "__deepcopy__", copy_detached)
    try:
        return copy.deepcopy(value)
    finally:
        ledger.restore()


def clone(nest: object) -> Any:
    return mapped_tensors(nest, lambda tensor: tensor.detach().clone())


def mapped_tensors(nest: object, convert: Callable[[Any], Any]) -> Any:
    """The same nest with every tensor converted."""
    return mapped(nest, lambda leaf: convert(leaf) if hasattr(leaf, "untyped_storage") else leaf)


def random_state(context: TrainingContext) -> tuple[Any, Any]:
    torch = context.torch
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if context.device_type == "cuda" else None


def set_random_state(context: TrainingContext, state: tuple[Any, Any]) -> None:
    context.torch.set_rng_state(state[0])
    if state[1] is not None:
        context.torch.cuda.set_rng_state_all(state[1])
