"""Where a training ran when it was saved, and where it goes on: every difference is named, and bit-identity is not claimed where there is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any


def surroundings(torch: Any, more: Mapping[str, Any] = {}) -> dict[str, Any]:
    """What the bits of a training depend on besides its state. ``more``: what the caller knows (length of the data, digest of the script, number of ranks).

    The CUDA devices are those of a process that uses them: asking in another one would start CUDA there, and children that are forked later could not.
    """
    return {
        "torch": str(torch.__version__), "python": ".".join(map(str, sys.version_info[:3])), "machine": os.uname().machine,
        "vector instructions": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
        "threads between operators": torch.get_num_interop_threads(),
        "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else [],
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(), "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic, "matmul precision": torch.get_float32_matmul_precision(), **more}


def drift(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each difference, in words; nothing where there is none."""
    names = [*before, *(name for name in now if name not in before)]
    return [f"{name}: {_shown(before.get(name))} when it was saved, {_shown(now.get(name))} now" for name in names if before.get(name) != now.get(name)]


def _shown(value: Any) -> str:
    return "unknown" if value is None else str(value)[:120]
