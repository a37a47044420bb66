"""Cases of silu_mul: ragged sizes, every type, a strided input, no elements, large values."""

from __future__ import annotations

from functools import partial

import torch

from flatout.kernels.kernel import Case, Inputs

# shape, type, scale
SMALL = [
    ((5,), torch.float32, 1.0),
    ((3, 341), torch.float32, 1.0),
    ((4, 1024), torch.float16, 1.0),
    ((7, 33), torch.bfloat16, 1.0),
    ((2, 0), torch.float32, 1.0),
    ((64,), torch.float32, 30.0),
]
LARGE = [((8192, 4096), torch.bfloat16, "gpu"), ((1024, 1024), torch.float32, "any")]


def cases() -> list[Case]:
    small = [
        Case(
            f"{shape}, {str(dtype).removeprefix('torch.')}, up to {3 * scale:g}",
            partial(_inputs, shape=shape, dtype=dtype, scale=scale),
            dtype,
            ("a", "b"),
            inner_roundings=2.0,
        )
        for shape, dtype, scale in SMALL
    ]
    strided = Case(
        "a transposed input",
        lambda draw: {"a": torch.randn(6, 5, generator=draw).t(), "b": torch.randn(5, 6, generator=draw)},
        torch.float32,
        ("a", "b"),
    )
    large = [
        Case(
            f"{shape}, {str(dtype).removeprefix('torch.')}",
            partial(_inputs, shape=shape, dtype=dtype, scale=1.0),
            dtype,
            ("a", "b"),
            bench=bench,
        )
        for shape, dtype, bench in LARGE
    ]
    return [*small, strided, *large]


def _inputs(draw: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> Inputs:
    return {
        "a": (scale * torch.randn(shape, generator=draw)).to(dtype),
        "b": torch.randn(shape, generator=draw).to(dtype),
    }
