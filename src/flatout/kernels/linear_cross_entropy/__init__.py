"""A linear layer and its cross entropy, without storing the logits.

Formula: loss = mean over counted targets of logsumexp(z) - (1 - s) z_target - s mean(z), with z = x weight' +
    bias and s the label smoothing. Gradient of z: softmax(z) - s / V, less 1 - s at the target.
What it saves: the plain computation of N rows and V classes stores N V logits, as many log-probabilities and
    as many gradients. This kernel stores one chunk of rows at a time, at most a sixteenth of them, and the
    gradient of the weight, V D.
What bounds it: arithmetic, the three matrix products of 2 N V D operations each, which run at torch's own
    rate. Between them, one kernel reads a chunk of logits twice and writes it once. If rows of V are not a
    multiple of 16 bytes, Tensor Cores multiply by a copy of the weight whose V is a multiple of 64.
Limits: reductions "mean" and "sum", class numbers as targets, no class weights; differentiable once.
Sources: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; gradients in the forward
    pass by chunks of rows as in Hsu et al., Liger Kernel, 2024, and Wijmans et al., Cut Your Losses, 2024,
    for further savings.
"""

from __future__ import annotations

from functools import partial

import torch

from flatout.kernels.kernel import Implementation, Inputs, Kernel
from flatout.kernels.linear_cross_entropy import reference
from flatout.kernels.linear_cross_entropy.cases import cases
from flatout.kernels.linear_cross_entropy.op import OPERATORS, SOURCE, linear_cross_entropy


def flops(inputs: Inputs) -> int:
    """Operations of forward and backward together: three products."""
    (rows, width), classes = inputs["x"].shape, inputs["weight"].shape[0]
    return 6 * rows * width * classes


KERNEL = Kernel(
    name="linear_cross_entropy",
    page=__doc__,
    reference=reference.linear_cross_entropy,
    implementations=(
        Implementation(
            "plain",
            partial(linear_cross_entropy, implementation="plain"),
            dtypes=(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        ),
        Implementation("triton", partial(linear_cross_entropy, implementation="triton"), "triton"),
        Implementation("cuda", partial(linear_cross_entropy, implementation="cuda"), "cuda"),
    ),
    cases=cases,
    operators=OPERATORS,
    sources=(SOURCE,),
    flops=flops,
)
