"""The probe for peak memory: the most that tensors take within one training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.measure.memory import allocations, bytes_at, reserved_for_graphs, running_totals
from flatout.trial.probes.allocations import AllocationRecorder
from flatout.trial.probes.leak import SETTLING_TICKS

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass
class TickWindow:
    """A tick in ns of our clock: its start, the bytes in use then, the start of its step, and its end."""

    start: int
    bytes_before: int
    step: int
    end: int


class PeakMemoryProbe(AllocationRecorder):
    """Measures the peak bytes of a step, the largest of its ticks without the first two.

    One of the first two may be the shorter last batch of an epoch. On a CUDA device it is what the allocator
    handed out (``max_memory_allocated``) plus the memory of recorded graphs. On a CPU it is the tensors alive
    when a tick began plus every later allocation. Both count parameters, gradients and optimizer state, but
    not the interpreter or a CUDA context. A step begins with its first forward pass that keeps gradients, so
    an evaluation between two epochs does not count.
    """

    def begin(self) -> None:
        super().begin()
        self.on_cuda = self.context.device_type == "cuda"
        self.bytes_before = 0
        self.step_start: int | None = None
        self.windows: list[TickWindow] = []
        self.peak = 0  # of a CUDA device

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step_start is None:
            self.step_start = self.clock.mark()
            if self.on_cuda:
                self.torch.cuda.reset_peak_memory_stats(self.context.device)

    def tick(self) -> None:
        super().tick()
        if len(self.tick_ends) > SETTLING_TICKS:
            start, end = self.tick_ends[-2:]
            self.windows.append(TickWindow(start, self.bytes_before, self.step_start or start, end))
            if self.on_cuda:
                self.peak = max(self.peak, int(self.torch.cuda.max_memory_allocated(self.context.device)))
        elif len(self.tick_ends) == 1 and not self.on_cuda:
            self.record()
        self.bytes_before = self.in_use()
        self.step_start = None
        if self.on_cuda:
            self.torch.cuda.reset_peak_memory_stats(self.context.device)

    def end(self) -> dict[str, Any]:
        super().end()
        if not self.windows:
            return {}
        if self.on_cuda:
            return {"peak_bytes": self.peak + reserved_for_graphs(self.torch, self.context.device)}
        events = self.events()
        offset = self.clock_offset_ns(events)
        # Memory taken before the recording is never seen to be freed
        totals = running_totals(allocations(events, None), 0)
        peak = 0
        for tick in self.windows:
            shift = tick.bytes_before - bytes_at(totals, tick.start + offset, 0)
            within = [total for ns, total in totals if tick.step <= ns - offset <= tick.end]
            peak = max(peak, tick.bytes_before, shift + max(within, default=-shift))
        return {"peak_bytes": peak}
