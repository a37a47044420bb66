"""Benchmarks the kernels on a GPU: bandwidth, memory and time, compared with torch and Liger-Kernel.

Goals: `augment` at 80 % of the measured copy bandwidth or more; `linear_cross_entropy` with at most a quarter
of the plain memory at a vocabulary of 50,000; `layer_norm` and `rms_norm` no slower than torch's own and
torch.compile's. The page reports each missed goal.

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
BANDWIDTH_GOAL, MEMORY_GOAL, CLASSES = 0.8, 4.0, "50,257"


def others(kernel: Any, case: Any) -> dict[str, Callable[..., Any]]:
    """Returns torch's own fused operation and Liger-Kernel's, called with the inputs of flatout's cases."""
    import torch

    functional = torch.nn.functional

    def with_residual(norm: Callable[..., Any]) -> Callable[..., Any]:
        def called(x: Any, weight: Any, eps: float, residual: Any, bias: Any = None) -> Any:
            h = x if residual is None else x + residual
            y = norm(h, weight, bias, eps)
            return y if residual is None else (y, h)

        return called

    found: dict[str, Callable[..., Any]] = {}
    if kernel.name == "layer_norm":
        found["torch's own"] = with_residual(
            lambda h, weight, bias, eps: functional.layer_norm(h, weight.shape, weight, bias, eps)
        )
    if kernel.name == "rms_norm":
        found["torch's own"] = with_residual(
            lambda h, weight, bias, eps: functional.rms_norm(h, weight.shape, weight, eps)
        )
    if find_spec("liger_kernel") is None:
        return found
    from liger_kernel.transformers import functional as liger

    if kernel.name == "layer_norm":
        found["Liger"] = with_residual(
            lambda h, weight, bias, eps: liger.liger_layer_norm(h, weight, bias, eps)
        )
    if kernel.name == "rms_norm":
        found["Liger"] = with_residual(lambda h, weight, bias, eps: liger.liger_rms_norm(h, weight, eps))
    if kernel.name == "linear_cross_entropy":

        def fused(x: Any, weight: Any, target: Any, bias: Any, reduction: str, label_smoothing: float) -> Any:
            made = liger.liger_fused_linear_cross_entropy(
                x, weight, target, bias=bias, reduction=reduction, label_smoothing=label_smoothing
            )
            return made[0] if isinstance(made, tuple) else made

        found["Liger"] = fused
    return found


def goals(rows: list[KernelTiming]) -> list[str]:
    """Returns each goal with its measurement; "not run" without one."""
    lines = []
    shares = [
        (row.share, row)
        for row in rows
        if row.kernel == "augment" and row.contestant in ("triton", "cuda") and row.share
    ]
    for case in dict.fromkeys(row.case for _, row in shares):
        share, best = max(
            ((share, row) for share, row in shares if row.case == case), key=lambda pair: pair[0]
        )
        lines.append(
            f"* augment, {case}: {100 * share:.0f} % of the measured bandwidth ({best.contestant}); "
            f"{_word(share >= BANDWIDTH_GOAL)}, the goal is 80 %"
        )
    for case in dict.fromkeys(
        row.case for row in rows if row.kernel == "linear_cross_entropy" and CLASSES in row.case
    ):
        of = {
            row.contestant: row.peak_bytes
            for row in rows
            if row.case == case and row.work != "forward" and row.peak_bytes
        }
        ours = [peak for name, peak in of.items() if name in ("triton", "cuda")]
        if "reference" in of and ours:
            times = of["reference"] / min(ours)
            lines.append(
                f"* linear_cross_entropy, {case}: {times:.1f} times less memory than plain; {_word(times >= MEMORY_GOAL)}, the goal is 4"
            )
    for name in ("layer_norm", "rms_norm"):
        for case, work in dict.fromkeys(
            (row.case, row.work) for row in rows if row.kernel == name and row.ms
        ):
            ms = {
                row.contestant: row.ms
                for row in rows
                if (row.kernel, row.case, row.work) == (name, case, work) and row.ms
            }
            ours = [ms[way] for way in ("triton", "cuda") if way in ms]
            theirs = {way: ms[way] for way in ("torch's own", "torch.compile") if way in ms}
            if ours and theirs:
                rival = min(theirs, key=lambda way: theirs[way])
                times = theirs[rival] / min(ours)
                lines.append(
                    f"* {name}, {case}, {work}: {times:.2f} times as fast as {rival}; {_word(times >= 1)}"
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
