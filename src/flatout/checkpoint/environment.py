"""The environment that the bits of a training depend on: recorded with a checkpoint, compared at a resume.

Any difference is reported and rules out bit-identity. Exact resume refuses then (`resume/choice.py` before the
program begins, `resume/session.py` at the resume point), flatout.Loop warns.
"""

import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def environment(torch: ModuleType, more: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Everything besides its state that the bits of a training depend on.

    ``more``: values from the caller (length of the data, digest of the script, number of ranks). CUDA devices
    are included only if the process already uses CUDA. Querying them would start CUDA, and children forked
    later could not use it.
    """
    return {
        "torch": str(torch.__version__),
        "python": ".".join(map(str, sys.version_info[:3])),
        "machine": os.uname().machine,
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "threads between operators": torch.get_num_interop_threads(),
        "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if torch.cuda.is_initialized()
        else [],
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "matmul precision": torch.get_float32_matmul_precision(),
        **more,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each difference as a sentence; empty if there is none."""
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name}: {_shown(before.get(name))} when it was saved, {_shown(now.get(name))} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)[:120]
