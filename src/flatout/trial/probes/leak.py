"""A probe for memory that grows from step to step: how much, and what holds it."""

from __future__ import annotations

from typing import Any

from flatout.agent.leak_finder import LeakFinder
from flatout.measure.load import resident_bytes
from flatout.measure.memory import allocations, bytes_at, running_totals
from flatout.measure.statistics import grows_evenly, growth_p_value, keeps_growing, slope
from flatout.schema.profile import MemoryGrowth
from flatout.trial.probes.allocations import AllocationRecorder, block_bytes

SETTLING_TICKS = 2  # memory taken before the recording is freed in the first ones
RARE = 0.001  # a rise less likely than this by chance is a trend
LEAST_BYTES = 1024  # a step; less may be a logged number
LEAST_RESIDENT_BYTES = 2**21  # over all steps; the size of a process fluctuates


class LeakProbe(AllocationRecorder):
    """Measures memory at the same point of each tick, and finds tensors that survive their tick.

    The first half of the ticks measures the process and the second half the tensors, because recording
    allocations itself takes memory.
    """

    def begin(self) -> None:
        self.sizes: list[float] = []  # of the device
        self.resident: list[float] = []
        self.holders = LeakFinder(
            self.torch,
            [loader.dataset for loader in self.context.live_loaders if hasattr(loader.dataset, "__dict__")],
        )
        self.half = self.ticks // 2
        last = self.ticks - self.half - 1
        self.looks = {round(SETTLING_TICKS + part * (last - SETTLING_TICKS) / 3) for part in range(4)}
        super().begin()

    def tick(self) -> None:
        if len(self.resident) < self.half:
            self.resident.append(float(resident_bytes()))
            if len(self.resident) == self.half:
                self.record()
            return
        super().tick()
        if len(self.ends) - 1 in self.looks:
            self.holders.look(len(self.ends))
        if self.context.device_type == "cuda":
            self.sizes.append(
                float(self.torch.cuda.memory_allocated(self.context.device) - block_bytes(self.around.ours()))
            )

    def end(self) -> dict[str, Any]:
        held = self.holders.found(
            [*(tensor for tensors in self.known().values() for tensor in tensors), *self.around.ours()]
        )
        super().end()
        series = self.sizes
        if self.context.device_type != "cuda":
            events = self.events()
            later, totals = self.later_ns(events), running_totals(allocations(events, None), 0)
            series = [float(bytes_at(totals, end + later, 0)) for end in self.ends]
        series, resident = series[SETTLING_TICKS:], self.resident
        rise = slope(series)
        grows = keeps_growing(series, RARE) and rise >= LEAST_BYTES
        if held is not None and held.tensors_a_step >= 1:  # a slow program leaves time for a few steps only
            grows = grows or grows_evenly(series, LEAST_BYTES)
        leak = MemoryGrowth(
            rise,
            growth_p_value(series),
            grows or bool(held and held.graph),
            series=series,
            steps=len(series),
            where="device" if self.around.on_device else "host",
        )
        if held is not None:
            leak.holder, leak.place, leak.graph = held.holder, held.place, held.graph
            leak.tensors_a_step = held.tensors_a_step
        grown = max(resident, default=0) - min(resident, default=0) > LEAST_RESIDENT_BYTES
        host = MemoryGrowth(
            slope(resident),
            growth_p_value(resident),
            keeps_growing(resident, RARE) and grown,
            series=resident,
            steps=len(resident),
        )
        fullest = self.holders.fullest() if host.leaking else None
        if fullest is not None:
            host.holder, host.place = fullest.holder, fullest.place
        return {"leak": leak.to_json(), "host_growth": host.to_json()}
