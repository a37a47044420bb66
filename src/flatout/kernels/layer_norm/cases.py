"""Cases of layer_norm: ragged widths, one row, no rows, strides, large offsets, low variance."""

from functools import partial
from math import prod

import torch

from flatout.kernels.kernel import Case, Inputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# shape, type, with weight and bias, mean, eps
SMALL = [
    ((5, 7), F32, True, 0.0, 1e-5),
    ((3, 1), F32, True, 0.0, 1.0),
    ((2, 3, 64), F32, False, 0.0, 1e-5),
    ((4, 33), F16, True, 0.0, 1e-5),
    ((3, 129), BF16, True, 0.0, 1e-6),
    ((0, 16), F32, True, 0.0, 1e-5),
    ((6, 40), F32, True, 30.0, 1e-2),
    ((4, 256), BF16, True, 0.0, 1e-5),
    ((3, 24), F16, True, 0.0, 1e-2),
]
LARGE = [
    ((8192, 1024), BF16, "gpu"),
    ((8192, 4096), BF16, "gpu"),
    ((4096, 1024), F32, "any"),
    ((8192, 4096), F32, "gpu"),
]


def cases() -> list[Case]:
    strided = Case(
        "every second column of a wider tensor",
        partial(_inputs, shape=(4, 20), dtype=F32, step=2),
        F32,
        ("x", "weight", "bias"),
        terms=20,
    )
    large = [
        Case(
            f"{shape[0]:,} rows of {shape[1]:,}, {_type_name(dtype)}",
            partial(_inputs, shape=shape, dtype=dtype),
            dtype,
            ("x", "weight", "bias"),
            terms=shape[1],
            bench=bench,
        )
        for shape, dtype, bench in LARGE
    ]
    return [*(_case(*row) for row in SMALL), strided, *large]


def _case(shape: tuple[int, ...], dtype: torch.dtype, affine: bool, mean: float, eps: float) -> Case:
    title = f"{'x'.join(map(str, shape[:-1]))} rows of {shape[-1]}, {_type_name(dtype)}"
    return Case(
        title + ("" if affine else ", no weight") + (f", mean {mean:g}" if mean else ""),
        partial(_inputs, shape=shape, dtype=dtype, affine=affine, mean=mean, eps=eps),
        dtype,
        ("x", "weight", "bias") if affine else ("x",),
        # A mean far from zero costs the digits that every element shares with it.
        terms=max(prod(shape[:-1]), shape[-1]) * (1 + int(mean**2)),
    )


def _inputs(
    draw: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    affine: bool = True,
    mean: float = 0.0,
    eps: float = 1e-5,
    step: int = 1,
) -> Inputs:
    """``step``: x is every such column of a wider tensor."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(dtype)

    *rows, width = shape
    x = (normal(*rows, width * step) + mean)[..., ::step]
    weight, bias = (normal(width), normal(width)) if affine else (None, None)
    return {"x": x, "weight": weight, "bias": bias, "eps": eps}


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
