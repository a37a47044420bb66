"""Typical mistakes of an AdamW step. The gate must reject each of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flatout.kernels.adamw import reference as module

reference: Any = module.adamw


def decay_in_the_gradient(
    parameters: list[Tensor], gradients: list[Tensor], *args: object, weight_decay: float, **more: object
) -> tuple[Tensor, ...]:
    """Adam with L2, not AdamW."""
    mixed = [g + weight_decay * p for p, g in zip(parameters, gradients, strict=True)]
    return reference(parameters, mixed, *args, weight_decay=0.0, **more)


def no_bias_correction(*args: object, step: int, **more: object) -> tuple[Tensor, ...]:
    return reference(*args, step=10**6, **more)


def eps_inside_the_root(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step: int,
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, ...]:
    """sqrt(v + eps): like Adam without correction; visible if the squares are small."""
    shifted = reference(
        parameters, gradients, means, [v + 1e-5 for v in squares], step, lr, weight_decay=weight_decay
    )
    right = reference(parameters, gradients, means, squares, step, lr, weight_decay=weight_decay)
    return (*shifted[: 2 * len(parameters)], *right[2 * len(parameters) :])


def step_from_zero(*args: object, step: int, **more: object) -> tuple[Tensor, ...]:
    """Counts one step too few."""
    return reference(*args, step=max(step - 1, 1), **more)


def moments_in_half(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    **more: object,
) -> tuple[Tensor, ...]:
    """Stores the means in bfloat16."""
    return reference(parameters, gradients, [m.bfloat16().to(m.dtype) for m in means], squares, **more)


def last_tensor_forgotten(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    **more: object,
) -> tuple[Tensor, ...]:
    found = list(reference(parameters, gradients, means, squares, **more))
    found[len(parameters) - 1] = parameters[-1]
    return tuple(found)


VARIANTS = {
    each.__name__: each
    for each in (
        decay_in_the_gradient,
        no_bias_correction,
        eps_inside_the_root,
        step_from_zero,
        moments_in_half,
        last_tensor_forgotten,
    )
}
