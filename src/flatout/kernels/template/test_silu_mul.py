"""The gate of silu_mul as a test.

`flatout kernel check` runs the same checks, survives a crash, and runs CUDA C++ without a GPU.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from flatout.kernels.gate import checks, run

from . import KERNEL


def test_every_check_passes():
    failed = [outcome for name, check in checks(KERNEL) if (outcome := run(name, check)).status == "failed"]
    assert not failed
