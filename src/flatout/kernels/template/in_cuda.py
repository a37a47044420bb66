"""silu_mul in CUDA C++: the launches of kernel.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from flatout.kernels.cuda import SUFFIX, CudaSource

SOURCE = CudaSource(Path(__file__).with_name("kernel.cu"))
THREADS, MAX_BLOCKS = 256, 4096


def forward(a: Tensor, b: Tensor, y: Tensor) -> None:
    """Fills y. All contiguous, of one shape."""
    SOURCE.launch(f"forward_{SUFFIX[a.dtype]}", _grid(a), THREADS, (a, b, y, a.numel()), a.device)


def backward(g: Tensor, a: Tensor, b: Tensor, grad_a: Tensor, grad_b: Tensor) -> None:
    """Fills of_a and of_b."""
    SOURCE.launch(
        f"backward_{SUFFIX[a.dtype]}", _grid(a), THREADS, (g, a, b, grad_a, grad_b, a.numel()), a.device
    )


def _grid(a: Tensor) -> tuple[int]:
    return (min(-(-a.numel() // (THREADS * 4)), MAX_BLOCKS),)
