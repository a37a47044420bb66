"""Layer normalisation over the last axis.

Formula: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, statistics in float32.
Gradient: with n = (x - mean) * rstd and g = dy * weight, dx = rstd * (g - n * mean(g * n) - mean(g)). Weight
    and bias get the sums over rows of dy * n and dy, in a fixed order.
What bounds it: memory. Forward reads x and writes y, each element once: 2 * N * size bytes per row. About 10
    operations per element are far below what any GPU can do meanwhile. A row stays in registers between
    statistics and result, so nothing is read twice. The backward pass reads a row again from the cache.
Limits: 16,384 columns; wider rows, other types and CPUs use the plain implementation. Differentiable once.
Sources: Ba, Kiros and Hinton, Layer Normalization, 2016; Triton's tutorial "Layer Normalization" for the form
    of the backward pass.
"""

from functools import partial

import torch

from flatout.kernels.kernel import Implementation, Inputs, Kernel
from flatout.kernels.layer_norm import reference
from flatout.kernels.layer_norm.cases import cases
from flatout.kernels.layer_norm.op import OPERATORS, layer_norm

ALL_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def moved_bytes(inputs: Inputs) -> int:
    """x is read, y written."""
    x: torch.Tensor = inputs["x"]
    return 2 * x.numel() * x.element_size()


KERNEL = Kernel(
    name="layer_norm",
    page=__doc__,
    reference=reference.layer_norm,
    implementations=(
        Implementation("plain", partial(layer_norm, implementation="plain"), dtypes=ALL_TYPES),
        Implementation("triton", partial(layer_norm, implementation="triton"), "triton"),
    ),
    cases=cases,
    operators=OPERATORS,
    moved_bytes=moved_bytes,
)
