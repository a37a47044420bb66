"""Crop, flip, normalise, cast and change the layout of a batch of uint8 images, in one pass.

Formula: out = (image / 255 - mean) / std at the cropped and mirrored place, computed in float32 and rounded
    once to the output's type. float32 matches the bits of torchvision's RandomCrop, RandomHorizontalFlip,
    ToTensor and Normalize. A byte has 256 values, so all arithmetic is a table of 256 entries per channel,
    computed by torch itself.
What bounds it: memory. Each output element takes one byte of reads and two or four of writes. With torch
    operations on the device, the same takes six passes over float32. The table is in shared memory (CUDA C++)
    or in the L1 cache (Triton).
Limits: no interpolation; images of at most 67 million elements each (a batch may be larger); 48 channels in
    CUDA C++.
Sources: torchvision.transforms, RandomCrop, ToTensor, Normalize.
"""

from __future__ import annotations

from functools import partial

import torch

from flatout.kernels.augment import reference
from flatout.kernels.augment.cases import cases
from flatout.kernels.augment.op import OPERATORS, SOURCE, augment
from flatout.kernels.kernel import Implementation, Inputs, Kernel


def moved_bytes(inputs: Inputs) -> int:
    """Each output element is written, and its byte read."""
    channels = len(inputs["mean"])
    return (
        len(inputs["images"])
        * channels
        * inputs["size"][0]
        * inputs["size"][1]
        * (1 + torch.empty(0, dtype=inputs["dtype"]).element_size())
    )


KERNEL = Kernel(
    name="augment",
    page=__doc__,
    reference=reference.augment,
    implementations=(
        Implementation("plain", partial(augment, implementation="plain")),
        Implementation("triton", partial(augment, implementation="triton"), "triton"),
        Implementation("cuda", partial(augment, implementation="cuda"), "cuda"),
    ),
    cases=cases,
    operators=OPERATORS,
    sources=(SOURCE,),
    ulps=2.0,
    exact=True,
    moved_bytes=moved_bytes,
)
