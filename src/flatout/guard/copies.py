"""Copies of modules, optimizers and random states, for steps that are run again."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.measure.nests import mapped

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import TrainingContext

MOST_OUTPUTS = 6  # most outputs whose gradients are separated
NOTHING_LEFT = 1e-3  # share of a gradient that counts as zero after subtracting the module's inner part
SHARPENING = 0.02  # how far ``sharpen`` moves a weight per update, as a share of its tensor's RMS


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


def in_double(roots: list[Any], optimizers: list[Any], torch: ModuleType) -> None:
    for root in roots:
        root.double()
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, held in state.items():
                if (
                    isinstance(held, torch.Tensor)
                    and held.is_floating_point()
                    and held.shape == p.shape
                    and held.dim()
                ):
                    state[key] = held.double()


def outside_gradients(outputs: list[Any], grads: dict[int, Any], torch: ModuleType) -> dict[int, Any]:
    """The part of each output's gradient that does not come from another output.

    For example, the gradient of logits may come from a loss that the module also returns.
    """
    found = dict(grads)
    observed = [at for at in sorted(grads) if at < len(outputs) and outputs[at].requires_grad]
    for at in observed if 1 < len(observed) <= MOST_OUTPUTS else ():
        for other in observed:
            inside = (
                torch.autograd.grad(
                    outputs[other], outputs[at], grads[other], retain_graph=True, allow_unused=True
                )[0]
                if other != at
                else None
            )
            if inside is not None and at in found:
                found[at] = found[at] - inside
                if float(found[at].norm()) <= NOTHING_LEFT * float(grads[at].norm()):
                    del found[at]
    return found


def square(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.double().square().sum())


def size_of(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def held_by(roots: list[Any]) -> list[Any]:
    return [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]


def rates_of(parameters: list[Any]) -> list[float]:
    """The step size of each tensor. A tensor that starts at zero moves as far as the others."""
    sizes = [float(p.detach().double().square().mean().sqrt()) for p in parameters]
    common = sorted(sizes)[len(sizes) // 2] if sizes else 0.0
    return [SHARPENING * max(size, 0.1 * common) for size in sizes]


def adam(p: Tensor, grad: Tensor, rate: float, moments: list[Any], at: int, torch: ModuleType) -> None:
    """Adam without an optimizer object, which would count as one of the program's."""
    with torch.no_grad():
        moments[0].lerp_(grad, 0.1)
        moments[1].lerp_(grad.square(), 0.05)
        size = (moments[1] / (1 - 0.95**at)).sqrt_().add_(1e-30)
        p.sub_(rate / (1 - 0.9**at) * moments[0] / size)


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
