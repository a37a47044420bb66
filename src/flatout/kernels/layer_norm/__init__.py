"""Layer normalisation over the last axis, with a preceding residual addition.

Formula: h = x + residual; y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias, statistics in float32.
Gradient: with n = (h - mean) * rstd and g = dy * weight, dh = rstd * (g - n * mean(g * n) - mean(g)). Weight
    and bias get the sums over rows of dy * n and dy, in a fixed order.
What bounds it: memory. Forward reads x and residual and writes y and h, each element once: 4 * N * size bytes
    per row. About 10 operations per element are far below what any GPU can do meanwhile. A row stays in
    registers (Triton) or shared memory (CUDA C++) between statistics and result, so nothing is read twice.
    The backward pass reads a row again from the cache.
Limits: 16,384 columns in Triton, 12,288 in CUDA C++; wider rows, other types and CPUs use the plain
    implementation. Differentiable once.
Sources: Ba, Kiros and Hinton, Layer Normalization, 2016; Triton's tutorial "Layer Normalization" for the form
    of the backward pass.
"""

from __future__ import annotations

from functools import partial

import torch

from flatout.kernels.kernel import Implementation, Inputs, Kernel
from flatout.kernels.layer_norm import reference
from flatout.kernels.layer_norm.cases import cases
from flatout.kernels.layer_norm.op import OPERATORS, SOURCE, layer_norm

ALL_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def moved_bytes(inputs: Inputs) -> int:
    """x and residual are read, y and h written."""
    x: torch.Tensor = inputs["x"]
    return x.numel() * x.element_size() * (4 if inputs["residual"] is not None else 2)


KERNEL = Kernel(
    name="layer_norm",
    page=__doc__,
    reference=reference.layer_norm,
    implementations=(
        Implementation("plain", partial(layer_norm, implementation="plain"), dtypes=ALL_TYPES),
        Implementation("triton", partial(layer_norm, implementation="triton"), "triton"),
        Implementation("cuda", partial(layer_norm, implementation="cuda"), "cuda"),
    ),
    cases=cases,
    operators=OPERATORS,
    sources=(SOURCE,),
    moved_bytes=moved_bytes,
)
