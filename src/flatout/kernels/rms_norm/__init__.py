"""Root-mean-square normalisation over the last axis, with a preceding residual addition.

Formula: h = x + residual; y = h / sqrt(mean(h^2) + eps) * weight, statistics in float32.
Gradient: that of layer_norm without the terms of the mean.
What bounds it: memory, as layer_norm; the kernels are those of layer_norm with ``centre`` off.
Limits: those of layer_norm.
Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019.
"""

from __future__ import annotations

from functools import partial

from flatout.kernels.kernel import Implementation, Kernel
from flatout.kernels.layer_norm import WITH_DOUBLE, moved_bytes, reference
from flatout.kernels.layer_norm.cases import cases
from flatout.kernels.layer_norm.op import OPERATORS, SOURCE, rms_norm

KERNEL = Kernel(
    name="rms_norm",
    page=__doc__,
    reference=reference.rms_norm,
    implementations=(
        Implementation("plain", partial(rms_norm, implementation="plain"), dtypes=WITH_DOUBLE),
        Implementation("triton", partial(rms_norm, implementation="triton"), "triton"),
        Implementation("cuda", partial(rms_norm, implementation="cuda"), "cuda"),
    ),
    cases=partial(cases, False),
    operators=OPERATORS,
    sources=(SOURCE,),
    moved_bytes=moved_bytes,
)
