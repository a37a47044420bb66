"""Cases of linear_cross_entropy: ragged and padded vocabularies, ignored targets, chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from flatout.kernels.kernel import Case, Inputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Loss:
    """What a case computes. ``ignored`` is a share of the targets, ``scale`` that of x."""

    rows: int
    width: int
    classes: int
    dtype: torch.dtype
    bias: bool = False
    ignored: float = 0.0
    reduction: str = "mean"
    smoothing: float = 0.0
    scale: float = 1.0
    pad_to: int = 0


# the fields of a Loss
SMALL = [
    (5, 4, 7, F32, True, 0.0, "mean", 0.0, 1.0),
    (6, 8, 33, F32, False, 0.5, "mean", 0.1, 1.0),
    (3, 2, 1, F32, True, 0.0, "sum", 0.0, 1.0),
    (4, 8, 130, F32, True, 0.4, "sum", 0.0, 1.0),
    (9, 6, 1000, F32, False, 0.2, "mean", 0.2, 1.0),
    (4, 8, 64, BF16, True, 0.25, "mean", 0.0, 1.0),
    (4, 8, 257, F16, False, 0.25, "mean", 0.1, 1.0),
    (0, 4, 8, F32, True, 0.0, "sum", 0.0, 1.0),
    (4, 4, 9, F32, True, 1.0, "sum", 0.0, 1.0),
    (4, 4, 12, F32, True, 0.0, "mean", 0.0, 60.0),
]
PADDED = [
    ((5, 4, 7, F32, True, 0.3, "mean", 0.1, 1.0), 64),
    ((4, 8, 257, F16, True, 0.25, "mean", 0.1, 1.0), 64),
    ((6, 8, 130, BF16, False, 0.2, "sum", 0.0, 1.0), 64),
    ((3, 6, 1000, F32, True, 1.0, "sum", 0.0, 1.0), 3),
    ((4, 4, 64, F32, True, 0.0, "mean", 0.0, 60.0), 64),
]  # each with the multiple of classes for the products
LARGE = [
    (256, 128, 50257, F32, "any"),
    (8192, 768, 50257, F32, "gpu"),
    (8192, 768, 50257, BF16, "gpu"),
    (8192, 4096, 128256, BF16, "gpu"),
]


def cases() -> list[Case]:
    return [
        *(_case(Loss(*row)) for row in SMALL),
        *(_case(Loss(*row, pad_to=pad_to)) for row, pad_to in PADDED),
        _all_ignored(),
        _in_chunks(),
        _in_chunks(64),
        *(
            Case(
                f"{rows:,} rows of {width:,}, {classes:,} classes, {str(dtype).removeprefix('torch.')}",
                partial(_inputs, loss=Loss(rows, width, classes, dtype)),
                dtype,
                ("x", "weight"),
                terms=width,
                bench=bench,
            )
            for rows, width, classes, dtype, bench in LARGE
        ),
    ]


def _case(loss: Loss) -> Case:
    title = f"{loss.rows} rows of {loss.width}, {loss.classes} classes, {str(loss.dtype).removeprefix('torch.')}, {loss.reduction}"
    title += f", smoothing {loss.smoothing:g}" if loss.smoothing else ""
    title += f", {100 * loss.ignored:.0f} % ignored" if loss.ignored else ""
    title += f", in multiples of {loss.pad_to}" if loss.pad_to else ""
    # exp() turns the absolute error of a logit into a relative one, so logits of 60 lose the digits of 60.
    return Case(
        title,
        partial(_inputs, loss=loss),
        loss.dtype,
        ("x", "weight", *(("bias",) if loss.bias else ())),
        terms=int((loss.width + loss.rows) * (1 + loss.scale**2)),
        inside=0.0 if loss.dtype is F32 else 8.0,
    )


def _all_ignored() -> Case:
    return Case(
        "every target ignored, mean",
        partial(_inputs, loss=Loss(3, 4, 9, F32, bias=True, ignored=1.0)),
        F32,
        ("x", "weight", "bias"),
        terms=8,
    )


def _in_chunks(pad_to: int = 0) -> Case:
    """More rows than one chunk: 20 x 14,000 logits are 1.1 MB."""
    title = "20 rows of 3, 14,000 classes, float32, in chunks" + (
        f", in multiples of {pad_to}" if pad_to else ""
    )
    return Case(
        title,
        partial(_inputs, loss=Loss(20, 3, 14_000, F32, ignored=0.1, pad_to=pad_to)),
        F32,
        ("x", "weight"),
        terms=14_000,
    )


def _inputs(draw: torch.Generator, loss: Loss) -> Inputs:
    rows, width, classes, dtype = loss.rows, loss.width, loss.classes, loss.dtype
    target = torch.randint(classes, (rows,), generator=draw)
    target[torch.rand(rows, generator=draw) < loss.ignored] = -100
    return {
        "x": (loss.scale * torch.randn(rows, width, generator=draw)).to(dtype),
        "weight": torch.randn(classes, width, generator=draw).to(dtype),
        "target": target,
        "bias": torch.randn(classes, generator=draw).to(dtype) if loss.bias else None,
        "reduction": loss.reduction,
        "label_smoothing": loss.smoothing,
        "pad_to": loss.pad_to,
    }
