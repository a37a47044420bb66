"""One step of AdamW over many tensors, in plain torch, nothing in place. Works in float64.

p <- p (1 - lr wd);   m <- m + (1 - b1)(g - m);   v <- b2 v + (1 - b2) g^2
p <- p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
"""

from __future__ import annotations

from torch import Tensor


def adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step: int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> tuple[Tensor, ...]:
    """New parameters, then new means, then new squares. ``step`` is t: 1 at the first step."""
    made: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for p, g, m, v in zip(parameters, gradients, means, squares, strict=True):
        g = g.to(m.dtype)
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        new = p.to(m.dtype) * (1 - lr * weight_decay)
        new = new - lr / (1 - beta1**step) * m / (v.sqrt() / (1 - beta2**step) ** 0.5 + eps)
        for held, value in zip(made, (new.to(p.dtype), m, v), strict=True):
            held.append(value)
    return tuple(tensor for held in made for tensor in held)
