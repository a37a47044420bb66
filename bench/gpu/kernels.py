"""Benchmarks layer_norm on a GPU, compared with torch's own, torch.compile's and Liger-Kernel's.

Goal: no slower than torch's own and torch.compile's. The page reports each missed goal.

    python bench/gpu/kernels.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import measure, options

from flatout.cli.kernel_bench import KernelTiming

NO_GPU = 2


def others(kernel: Any, case: Any) -> dict[str, Callable[..., Any]]:
    """Returns torch's own fused operation and Liger-Kernel's, called with the inputs of flatout's cases."""
    import torch

    norms: dict[str, Callable[..., Any]] = {
        "torch's own": lambda x, weight, bias, eps: torch.nn.functional.layer_norm(
            x, weight.shape, weight, bias, eps
        )
    }
    if find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_layer_norm

        norms["Liger"] = liger_layer_norm
    return norms


def goals(rows: list[KernelTiming]) -> list[str]:
    """Returns each goal with its measurement; "not run" without one."""
    lines = []
    for case, work in dict.fromkeys((row.case, row.passes) for row in rows if row.ms):
        ms = {row.implementation: row.ms for row in rows if (row.case, row.passes) == (case, work) and row.ms}
        ours = ms.get("triton")
        theirs = {way: ms[way] for way in ("torch's own", "torch.compile") if way in ms}
        if ours and theirs:
            rival = min(theirs, key=lambda way: theirs[way])
            times = theirs[rival] / ours
            lines.append(
                f"* layer_norm, {case}, {work}: {times:.2f} times as fast as {rival}; {_word(times >= 1)}"
            )
    missing = [] if find_spec("liger_kernel") else ["* Liger-Kernel: not run, because it is not installed"]
    return [*(lines or ["* goals: not run"]), *missing, ""]


def _word(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def main() -> int:
    args = options(__doc__).parse_args()
    import torch

    if not torch.cuda.is_available() and not args.smoke:
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was measured or written.\n"
            "Add --smoke to run the same code on the CPU.\n"
        )
        return NO_GPU
    return measure(
        "kernels_gpu" if torch.cuda.is_available() else "kernels", "Kernels on a GPU", args, others, goals
    )


if __name__ == "__main__":
    raise SystemExit(main())
