"""The public torch.library operators for silu_mul and its gradient, with fakes for torch.compile."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

IMPLEMENTATIONS = {  # the file of each and the package that it requires; likely fastest first
    "triton": (".in_triton", "triton"),
    "cuda": (".in_cuda", "torch"),
}
HALVES_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


def silu_mul(a: Tensor, b: Tensor, implementation: str = "") -> Tensor:
    """silu(a) * b for a and b of one shape and type; differentiable once.

    ``implementation``: "" (the best here), or a name.
    """
    if a.shape != b.shape or a.dtype is not b.dtype:
        raise ValueError(
            f"a is {a.dtype} {tuple(a.shape)} and b {b.dtype} {tuple(b.shape)}; they must have the same shape and type"
        )
    result: Tensor = torch.ops.silu_mul.forward(a, b, implementation)
    return result


def forward(a: Tensor, b: Tensor, implementation: str) -> Tensor:
    name = implementation or best(a)
    a, b = a.contiguous(), b.contiguous()
    if name == "plain":
        return torch.nn.functional.silu(a) * b
    y = torch.empty_like(a)
    if y.numel():
        import_module(IMPLEMENTATIONS[name][0], __package__).forward(a, b, y)
    return y


def backward(g: Tensor, a: Tensor, b: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    name = implementation or best(a)
    g, a, b = g.contiguous(), a.contiguous(), b.contiguous()
    if name == "plain":
        s = torch.sigmoid(a)
        return g * b * s * (1 + a * (1 - s)), g * a * s
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    if a.numel():
        import_module(IMPLEMENTATIONS[name][0], __package__).backward(g, a, b, grad_a, grad_b)
    return grad_a, grad_b


def best(a: Tensor) -> str:
    """The best implementation for this tensor; on a CPU, torch's own operations."""
    if not a.is_cuda or a.dtype not in HALVES_AND_SINGLE:
        return "plain"
    return next((name for name, (_, package) in IMPLEMENTATIONS.items() if find_spec(package)), "plain")


_forward = torch.library.custom_op("silu_mul::forward", forward, mutates_args=())
_backward = torch.library.custom_op("silu_mul::backward", backward, mutates_args=())
_forward.register_fake(
    lambda a, b, implementation: torch.empty_like(a, memory_format=torch.contiguous_format)
)
_backward.register_fake(
    lambda g, a, b, implementation: (
        torch.empty_like(a, memory_format=torch.contiguous_format),
        torch.empty_like(b, memory_format=torch.contiguous_format),
    )
)


def _setup(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.implementation = inputs
    ctx.save_for_backward(a, b)


def _gradient(ctx: FunctionCtx, g: Tensor) -> Any:
    return (*torch.ops.silu_mul.backward(g, *ctx.saved_tensors, ctx.implementation), None)


_forward.register_autograd(_gradient, setup_context=_setup)
OPERATORS: dict[str, Any] = {"silu_mul::forward": forward, "silu_mul::backward": backward}
