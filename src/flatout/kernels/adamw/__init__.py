"""One step of AdamW over many tensors, in one launch.

Formula: p <- p (1 - lr wd); m <- m + (1 - b1)(g - m); v <- b2 v + (1 - b2) g^2; p <- p - lr / (1 - b1^t) * m
    / (sqrt(v) / sqrt(1 - b2^t) + eps).
Where it is for: torch's own fused AdamW (torch._fused_adamw_) requires parameters, gradients and moments in
    one type. It does not support parameters in half precision with moments in float32. This kernel has
    float32 moments for float32, float16 and bfloat16 parameters. If all have one type, use
    torch.optim.AdamW(fused=True): no lever replaces it by this kernel.
What bounds it: memory. A float32 parameter takes 16 bytes of reads and 12 of writes, a bfloat16 one 12 and
    10, with a dozen operations. The host builds a table of chunks (four addresses and a length each) for
    every call, because gradients may move each time.
Limits: dense tensors whose four members have the same strides, otherwise the plain implementation for that
    tensor; no amsgrad, no maximize; not differentiable.
Sources: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; torch.optim.AdamW for the order
    of operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flatout.kernels.adamw import reference, wrong
from flatout.kernels.adamw.cases import cases
from flatout.kernels.adamw.op import OPERATORS, SOURCE, adamw_
from flatout.kernels.kernel import Implementation, Inputs, Kernel


def _updated(
    implementation: str,
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    **more: Any,
) -> tuple[torch.Tensor, ...]:
    adamw_(parameters, gradients, means, squares, implementation=implementation, **more)
    return (*parameters, *means, *squares)


def moved_bytes(inputs: Inputs) -> int:
    """Parameters and moments are read and written, gradients read."""
    return sum(p.numel() * (3 * p.element_size() + 16) for p in inputs["parameters"])


KERNEL = Kernel(
    name="adamw",
    page=__doc__,
    reference=reference.adamw,
    implementations=(
        Implementation("plain", partial(_updated, "plain")),
        Implementation("triton", partial(_updated, "triton"), "triton"),
        Implementation("cuda", partial(_updated, "cuda"), "cuda"),
    ),
    cases=cases,
    wrong=wrong.VARIANTS,
    operators=OPERATORS,
    sources=(SOURCE,),
    moved_bytes=moved_bytes,
)
