"""Cases of adamw: small tensors, a chunk plus one element, half precision, an empty tensor, two steps."""

from __future__ import annotations

from functools import partial

import torch

from flatout.kernels.kernel import Case, Inputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Shapes = list[tuple[int, ...]]
# shapes, type, step, decay, lr
SMALL: list[tuple[Shapes, torch.dtype, int, float, float]] = [
    ([(5,), (3, 7), (1,)], F32, 1, 0.0, 1e-2),
    ([(33,), (0,), (4, 4), (1025,)], F32, 7, 0.1, 1e-2),
    ([(9,), (17, 3)], BF16, 3, 0.1, 0.5),
    ([(8, 8), (31,)], F16, 2, 0.01, 0.1),
    ([(65537,)], F32, 1000, 0.01, 1e-2),
]
LARGE: list[tuple[Shapes, torch.dtype, str]] = [
    ([(768, 768)] * 96 + [(768,)] * 96, F32, "gpu"),
    ([(4096, 4096)] * 16, BF16, "gpu"),
    ([(64, 64)] * 40, F32, "any"),
]


def cases() -> list[Case]:
    small = [
        Case(
            f"{len(shapes)} tensors of {str(dtype).removeprefix('torch.')}, step {step}",
            partial(_inputs, shapes=shapes, dtype=dtype, step=step, decay=decay, lr=lr),
            dtype,
        )
        for shapes, dtype, step, decay, lr in SMALL
    ]
    strided = Case("a parameter whose gradient has other strides", _strided, F32)
    large = [
        Case(
            f"{len(shapes)} tensors, {sum(torch.Size(s).numel() for s in shapes):,} elements, {str(dtype).removeprefix('torch.')}",
            partial(_inputs, shapes=shapes, dtype=dtype, step=10, decay=0.1, lr=1e-3),
            dtype,
            bench=bench,
        )
        for shapes, dtype, bench in LARGE
    ]
    return [*small, strided, *large]


def _inputs(
    draw: torch.Generator, shapes: Shapes, dtype: torch.dtype, step: int, decay: float, lr: float
) -> Inputs:
    def normal(of: torch.dtype) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=draw).to(of) for shape in shapes]

    return {
        "parameters": normal(dtype),
        "gradients": normal(dtype),
        "means": [m.mul_(0.1) for m in normal(F32)],
        "squares": [v.square_().mul_(0.1) for v in normal(F32)],
        "step": step,
        "lr": lr,
        "weight_decay": decay,
    }


def _strided(draw: torch.Generator) -> Inputs:
    found = _inputs(draw, [(4, 6)], F32, 2, 0.1, 1e-2)
    return {**found, "gradients": [torch.randn(6, 4, generator=draw).t()]}
