"""Cases of layer_norm: ragged widths, one row, no rows, strides, large offsets, low variance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from flatout.kernels.kernel import Case, Inputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Norm:
    """What a case computes. ``step``: x is every such column of a wider tensor."""

    shape: tuple[int, ...]  # in front of the width
    width: int
    dtype: torch.dtype
    affine: bool = True
    offset: float = 0.0
    eps: float = 1e-5
    step: int = 1


# the fields of a Norm from its shape on
SMALL = [
    ((5,), 7, F32, True, 0.0, 1e-5),
    ((3,), 1, F32, True, 0.0, 1.0),
    ((2, 3), 64, F32, False, 0.0, 1e-5),
    ((4,), 33, F16, True, 0.0, 1e-5),
    ((3,), 129, BF16, True, 0.0, 1e-6),
    ((0,), 16, F32, True, 0.0, 1e-5),
    ((6,), 40, F32, True, 30.0, 1e-2),
    ((4,), 256, BF16, True, 0.0, 1e-5),
    ((3,), 24, F16, True, 0.0, 1e-2),
]
LARGE = [
    ((8192,), 1024, BF16, "gpu"),
    ((8192,), 4096, BF16, "gpu"),
    ((4096,), 1024, F32, "any"),
    ((8192,), 4096, F32, "gpu"),
]


def cases() -> list[Case]:
    small = [_case(Norm(*row)) for row in SMALL]
    strided = Case(
        "every second column of a wider tensor",
        partial(_inputs, norm=Norm((4,), 20, F32, step=2)),
        F32,
        _differentiable(True),
        terms=20,
    )
    large = [
        Case(
            f"{shape[0]:,} rows of {width:,}, {_type_name(dtype)}",
            partial(_inputs, norm=Norm(shape, width, dtype)),
            dtype,
            _differentiable(True),
            terms=width,
            bench=bench,
        )
        for shape, width, dtype, bench in LARGE
    ]
    return [*small, strided, *large]


def _case(norm: Norm) -> Case:
    title = f"{'x'.join(map(str, norm.shape))} rows of {norm.width}, {_type_name(norm.dtype)}{'' if norm.affine else ', no weight'}"
    return Case(
        title + (f", mean {norm.offset:g}" if norm.offset else ""),
        partial(_inputs, norm=norm),
        norm.dtype,
        # A mean far from zero costs the digits that every element shares with it.
        _differentiable(norm.affine),
        terms=max(prod(norm.shape), norm.width) * (1 + int(norm.offset**2)),
    )


def _inputs(draw: torch.Generator, norm: Norm) -> Inputs:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(norm.dtype)

    x = (normal(*norm.shape, norm.width * norm.step) + norm.offset)[..., :: norm.step]
    return {
        "x": x,
        "weight": normal(norm.width) if norm.affine else None,
        "bias": normal(norm.width) if norm.affine else None,
        "eps": norm.eps,
    }


def _differentiable(affine: bool) -> tuple[str, ...]:
    return ("x", "weight", "bias") if affine else ("x",)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
