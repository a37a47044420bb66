"""The public operator: one step of AdamW over lists of tensors, in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.cuda import SUFFIX, CudaSource
from flatout.kernels.kernel import has_triton

SOURCE = CudaSource(Path(__file__).with_name("kernel.cu"))
CHUNK = 1 << 16  # elements per block
THREADS = 512


def adamw_(
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
    implementation: str = "",
) -> None:
    """Update parameters, means and squares in place.

    The four lists match tensor by tensor in shape and strides, on one device. A gradient has its parameter's
    type; means and squares are float32 (float64 for float64). ``step`` counts from 1. Sparse and complex
    tensors are not supported. Raises ValueError for inputs that do not match. Source: Loshchilov and Hutter,
    Decoupled Weight Decay Regularization, 2019.
    """
    if not len(parameters) == len(gradients) == len(means) == len(squares):
        raise ValueError(
            f"{len(parameters)} parameters have {len(gradients)} gradients, {len(means)} means and {len(squares)} squares"
        )
    for at, (p, g, m, v) in enumerate(zip(parameters, gradients, means, squares, strict=True)):
        kept = torch.float64 if p.dtype is torch.float64 else torch.float32
        if (
            not p.shape == g.shape == m.shape == v.shape
            or g.dtype is not p.dtype
            or not m.dtype is v.dtype is kept
            or not p.is_floating_point()
            or not parameters[0].device == p.device == g.device == m.device == v.device
        ):
            raise ValueError(
                f"tensor {at}: parameter {p.dtype} {tuple(p.shape)}, gradient {g.dtype} {tuple(g.shape)}, mean {m.dtype} {tuple(m.shape)}, "
                f"square {v.dtype} {tuple(v.shape)} do not match"
            )
    torch.ops.flatout.adamw_(
        parameters, gradients, means, squares, step, lr, beta1, beta2, eps, weight_decay, implementation
    )


def forward(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    implementation: str,
) -> None:
    groups: dict[tuple[torch.dtype, str], list[tuple[Tensor, ...]]] = {}
    for tensors in zip(parameters, gradients, means, squares, strict=True):
        way = (implementation or best(tensors[0])) if _walks_alike(tensors) else "plain"
        groups.setdefault((tensors[0].dtype, way), []).append(tensors)
    # Compute these in double precision: 1 - 0.999 in float32 is wrong in its fifth digit.
    numbers = (
        lr / (1 - beta1**step),
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        1 - lr * weight_decay,
        (1 - beta2**step) ** 0.5,
    )
    for (dtype, way), members in groups.items():
        if way == "plain":
            for p, g, m, v in members:
                _plain(p, g, m, v, *numbers)
            continue
        rows = [row for tensors in members for row in _chunks(*tensors)]
        if not rows:
            continue
        device = members[0][0].device
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        if way == "triton":
            from flatout.kernels.adamw import in_triton

            in_triton.step(table, dtype, *numbers)
        else:
            SOURCE.launch(
                f"step_{SUFFIX[dtype]}", (len(rows),), THREADS, (table, *map(float, numbers)), device
            )


def best(p: Tensor) -> str:
    """The best implementation for this parameter."""
    if not p.is_cuda or p.dtype not in SUFFIX:
        return "plain"
    return "triton" if has_triton() else "cuda"


def _walks_alike(tensors: tuple[Tensor, ...]) -> bool:
    """Whether the four can be walked together in memory order: equal strides, no gaps."""
    first = tensors[0]
    same = all(tensor.stride() == first.stride() for tensor in tensors)
    return same and (
        first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)
        if first.dim() == 4
        else first.is_contiguous()
    )


def _chunks(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> list[list[int]]:
    """A table row for each chunk: its four addresses and its length."""
    places = [(tensor.data_ptr(), tensor.element_size()) for tensor in (p, g, m, v)]
    return [
        [*(address + first * size for address, size in places), min(CHUNK, p.numel() - first)]
        for first in range(0, p.numel(), CHUNK)
    ]


def _plain(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    rate: float,
    of_mean: float,
    beta2: float,
    of_square: float,
    eps: float,
    decay: float,
    root: float,
) -> None:
    g = g.to(m.dtype)
    m.lerp_(g, of_mean)
    v.mul_(beta2).addcmul_(g, g, value=of_square)
    # Compute in the type of the moments, and round once.
    new = p.to(m.dtype).mul(decay).addcdiv_(m, v.sqrt().div_(root).add_(eps), value=-rate)
    p.copy_(new)


_operator = torch.library.custom_op(
    "flatout::adamw_", forward, mutates_args=("parameters", "means", "squares")
)
_operator.register_fake(lambda *_: None)
OPERATORS: dict[str, Any] = {"flatout::adamw_": forward}
