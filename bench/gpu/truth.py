"""Measures a training script's steps without flatout: `python truth.py STEPS script.py [ARG...]`.

It records a CUDA event after each optimizer step, and ends the script after WARMUP + STEPS of them. In a
second stretch of STEPS, so that the first stays undisturbed, torch's debug mode reports each operation that
waits for the device, with its line. The output is one line of JSON: `step_ms` (list), `syncs` ({line: calls a
step}), `peak_bytes` (of one step, by the allocator), `device`. On the CPU it reads the host's clock, and
`syncs` and `peak_bytes` are null.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

WARMUP = 20
SYNC_WARNING = "called a synchronizing CUDA operation"


class Done(BaseException):
    """Raised to end the script."""


class Truth:
    def __init__(self, steps: int, script: Path) -> None:
        import torch

        self.torch, self.steps, self.script = torch, steps, str(script.resolve())
        self.cuda = torch.cuda.is_available()
        self.seen, self.marks, self.peak_bytes = 0, [], None
        self.syncs: Counter[int] = Counter()

    def after_step(self, *_: Any) -> None:
        self.seen += 1
        if self.seen < WARMUP:
            return
        if self.seen == WARMUP and self.cuda:
            self.torch.cuda.reset_peak_memory_stats()
        if self.seen <= WARMUP + self.steps:
            self.marks.append(self._mark())
        if self.seen == WARMUP + self.steps:
            if not self.cuda:
                raise Done
            self.peak_bytes = self.torch.cuda.max_memory_allocated()
            warnings.simplefilter("always")
            warnings.showwarning = self._warned
            self.torch.cuda.set_sync_debug_mode("warn")
        if self.seen == WARMUP + 2 * self.steps:
            self.torch.cuda.set_sync_debug_mode("default")
            raise Done

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _warned(self, message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if SYNC_WARNING not in str(message):
            return
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        self.syncs[frame.f_lineno if frame is not None else 0] += 1

    def metadata(self) -> dict[str, Any]:
        if self.cuda:
            self.torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        ms = [a.elapsed_time(b) if self.cuda else 1000 * (b - a) for a, b in pairs]
        syncs = (
            {line: count / self.steps for line, count in sorted(self.syncs.items())} if self.cuda else None
        )
        return {
            "device": self.torch.cuda.get_device_name() if self.cuda else "cpu",
            "step_ms": ms,
            "syncs": syncs,
            "peak_bytes": self.peak_bytes,
        }


def main() -> None:
    steps, script = int(sys.argv[1]), Path(sys.argv[2])
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(script.resolve().parent))
    truth = Truth(steps, script)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(truth.after_step)
    try:
        runpy.run_path(str(script.resolve()), run_name="__main__")
    except Done:
        pass
    print(json.dumps(truth.metadata()))


if __name__ == "__main__":
    main()
