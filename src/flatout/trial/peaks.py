"""The ear for one number: the most that tensors took within one training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatout.measure.memory import allocations, at, reserved_for_graphs, running_totals
from flatout.trial.remembering import SETTLING_TICKS, Recorded


@dataclass
class Seen:
    """A tick in ns of our clock: its start, with so many bytes in use, the start of the step in it, and the end of both."""

    start: int
    before: int
    step: int
    end: int


class PeakEar(Recorded):
    """Peak bytes of a step, the largest of its ticks but the first two: one of them may have been the last, shorter batch of an epoch.

    On a CUDA device what its allocator had handed out (``max_memory_allocated``) and what recorded graphs hold. On a CPU the tensors that lived as
    a tick began, and from there on every allocation. Both count parameters, gradients and optimizer state; neither counts the interpreter or a CUDA
    context. A step begins with its first forward pass that keeps gradients: an evaluation between two epochs is none of it.
    """

    def begin(self) -> None:
        super().begin()
        self.on_cuda = self.scene.device_type == "cuda"
        self.before = 0
        self.step_began: int | None = None
        self.seen: list[Seen] = []
        self.peak = 0  # of a CUDA device

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        if self.step_began is None:
            self.step_began = self.clock.mark()
            if self.on_cuda:
                self.torch.cuda.reset_peak_memory_stats(self.scene.device)

    def tick(self) -> None:
        super().tick()
        if len(self.ends) > SETTLING_TICKS:
            start, end = self.ends[-2:]
            self.seen.append(Seen(start, self.before, self.step_began or start, end))
            if self.on_cuda:
                self.peak = max(self.peak, int(self.torch.cuda.max_memory_allocated(self.scene.device)))
        elif len(self.ends) == 1 and not self.on_cuda:
            self.record()
        self.before = self.in_use()
        self.step_began = None
        if self.on_cuda:
            self.torch.cuda.reset_peak_memory_stats(self.scene.device)

    def end(self) -> dict[str, Any]:
        super().end()
        if not self.seen:
            return {}
        if self.on_cuda:
            return {"peak_bytes": self.peak + reserved_for_graphs(self.torch, self.scene.device)}
        events = self.events()
        later = self.later_ns(events)
        totals = running_totals(allocations(events, None), 0)  # what was taken before the recording is not seen to be given back
        peak = 0
        for tick in self.seen:
            shift = tick.before - at(totals, tick.start + later, 0)
            peak = max([peak, tick.before, *(shift + total for ns, total in totals if tick.step <= ns - later <= tick.end)])
        return {"peak_bytes": peak}
