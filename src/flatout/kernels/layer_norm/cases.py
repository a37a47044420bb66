"""Cases of layer_norm and rms_norm: ragged widths, one row, no rows, strides, large offsets, low variance."""

from __future__ import annotations

from functools import partial

import torch

from flatout.kernels.kernel import Case, Inputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# leading shape, width, dtype, residual, affine, offset, eps, spread
SMALL = [
    ((5,), 7, F32, True, True, 0.0, 1e-5),
    ((3,), 1, F32, False, True, 0.0, 1.0),
    ((2, 3), 64, F32, False, False, 0.0, 1e-5),
    ((4,), 33, F16, True, True, 0.0, 1e-5),
    ((3,), 129, BF16, True, True, 0.0, 1e-6),
    ((0,), 16, F32, True, True, 0.0, 1e-5),
    ((6,), 40, F32, False, True, 30.0, 1e-2),
    ((4,), 256, BF16, False, True, 0.0, 1e-5),
    ((3,), 24, F16, False, True, 0.0, 1e-2),
]
LARGE = [
    ((8192,), 1024, BF16, "gpu"),
    ((8192,), 4096, BF16, "gpu"),
    ((4096,), 1024, F32, "any"),
    ((8192,), 4096, F32, "gpu"),
]


def cases(centre: bool) -> list[Case]:
    small = [_case(centre, *row) for row in SMALL]
    strided = Case(
        "every second column of a wider tensor",
        partial(_inputs, centre=centre, shape=(4,), width=20, dtype=F32, residual=True, step=2),
        F32,
        _wanted(centre, True, True),
        terms=20,
    )
    large = [
        Case(
            f"{shape[0]:,} rows of {width:,}, {_word(dtype)}",
            partial(_inputs, centre=centre, shape=shape, width=width, dtype=dtype, residual=True),
            dtype,
            _wanted(centre, True, True),
            terms=width,
            bench=bench,
        )
        for shape, width, dtype, bench in LARGE
    ]
    return [*small, strided, *large]


def _case(
    centre: bool,
    shape: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    residual: bool,
    affine: bool,
    offset: float,
    eps: float,
) -> Case:
    title = f"{'x'.join(map(str, shape))} rows of {width}, {_word(dtype)}{', residual' if residual else ''}{'' if affine else ', no weight'}"
    rows = 1
    for size in shape:
        rows *= size
    return Case(
        title + (f", mean {offset:g}" if offset else ""),
        partial(
            _inputs,
            centre=centre,
            shape=shape,
            width=width,
            dtype=dtype,
            residual=residual,
            affine=affine,
            offset=offset,
            eps=eps,
        ),
        dtype,
        # A mean far from zero costs the digits that every element shares with it.
        _wanted(centre, residual, affine),
        terms=max(rows, width) * (1 + int(offset**2)),
        inside=2.0 if residual and dtype is not F32 else 0.0,
    )


def _inputs(
    draw: torch.Generator,
    centre: bool,
    shape: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    residual: bool,
    affine: bool = True,
    offset: float = 0.0,
    eps: float = 1e-5,
    step: int = 1,
) -> Inputs:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(dtype)

    x = (normal(*shape, width * step) + offset)[..., ::step]
    found: Inputs = {"x": x, "weight": normal(width) if affine else None}
    if centre:
        found["bias"] = normal(width) if affine else None
    return {**found, "eps": eps, "residual": normal(*shape, width) if residual else None}


def _wanted(centre: bool, residual: bool, affine: bool) -> tuple[str, ...]:
    return (
        "x",
        *(("weight",) if affine else ()),
        *(("bias",) if affine and centre else ()),
        *(("residual",) if residual else ()),
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
