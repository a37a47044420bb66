"""silu_mul: silu(a) * b, the gate of a SwiGLU layer, in one pass.

Formula: y = a * sigmoid(a) * b. Gradient: dy/da = b * s * (1 + a * (1 - s)) with s = sigmoid(a); dy/db = a *
s. What bounds it: memory. Each output takes two reads and one write; plain torch stores an intermediate of
the same size.
Sources: Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

from functools import partial

import torch

from flatout.kernels.kernel import Implementation, Inputs, Kernel

from . import reference
from .cases import cases
from .in_cuda import SOURCE
from .op import OPERATORS, silu_mul
from .wrong import WRONG

ALL_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def moved_bytes(inputs: Inputs) -> int:
    """The least traffic of a forward pass: a and b in, y out."""
    return 3 * inputs["a"].numel() * inputs["a"].element_size()


KERNEL = Kernel(
    name="silu_mul",
    page=__doc__,
    reference=reference.silu_mul,
    cases=cases,
    wrong=WRONG,
    operators=OPERATORS,
    moved_bytes=moved_bytes,
    implementations=(
        Implementation("plain", partial(silu_mul, implementation="plain"), dtypes=ALL_TYPES),
        Implementation("triton", partial(silu_mul, implementation="triton"), "triton"),
        Implementation("cuda", partial(silu_mul, implementation="cuda"), "cuda"),
    ),
    sources=(SOURCE,),
)
