"""A probe for memory that grows from step to step: how much, and what holds it."""

from typing import Any

from flatout.agent.leak_finder import LeakFinder
from flatout.measure.load import resident_bytes
from flatout.measure.memory import allocations, bytes_at, running_totals
from flatout.measure.statistics import grows_evenly, growth_p_value, keeps_growing, slope
from flatout.schema.profile import MemoryGrowth
from flatout.trial.probes.allocations import AllocationRecorder, block_bytes

SETTLING_TICKS = 2  # memory taken before the recording is freed in the first ones
MAX_CHANCE = 0.001  # a rise less likely than this by chance is a trend
MIN_BYTES = 1024  # a step; less may be a logged number
MIN_RESIDENT_BYTES = 2**21  # over all steps; the size of a process fluctuates


class LeakProbe(AllocationRecorder):
    """Measures memory at the same point of each tick, and finds tensors that survive their tick.

    The first half of the ticks measures the process and the second half the tensors, because recording
    allocations itself takes memory.
    """

    def begin(self) -> None:
        self.device_bytes: list[float] = []  # of the device
        self.resident: list[float] = []
        self.finder = LeakFinder(
            self.torch,
            [loader.dataset for loader in self.context.live_loaders if hasattr(loader.dataset, "__dict__")],
        )
        self.half_ticks = self.ticks // 2
        last = self.ticks - self.half_ticks - 1
        self.scan_ticks = {round(SETTLING_TICKS + part * (last - SETTLING_TICKS) / 3) for part in range(4)}
        super().begin()

    def tick(self) -> None:
        if len(self.resident) < self.half_ticks:
            self.resident.append(float(resident_bytes()))
            if len(self.resident) == self.half_ticks:
                self.record()
            return
        super().tick()
        if len(self.tick_ends) - 1 in self.scan_ticks:
            self.finder.inspect(len(self.tick_ends))
        if self.context.device_type == "cuda":
            allocated = self.torch.cuda.memory_allocated(self.context.device)
            self.device_bytes.append(float(allocated - block_bytes(self.tools.flatout_tensors())))

    def end(self) -> dict[str, Any]:
        holder = self.finder.leak(sum(self.live_tensors().values(), self.tools.flatout_tensors()))
        super().end()
        series = self.device_bytes
        if self.context.device_type != "cuda":
            events = self.events()
            offset, totals = self.clock_offset_ns(events), running_totals(allocations(events, None), 0)
            series = [float(bytes_at(totals, end + offset, 0)) for end in self.tick_ends]
        series, resident = series[SETTLING_TICKS:], self.resident
        growth = slope(series)
        grows = keeps_growing(series, MAX_CHANCE) and growth >= MIN_BYTES
        if (
            holder is not None and holder.tensors_a_step >= 1
        ):  # a slow program leaves time for a few steps only
            grows = grows or grows_evenly(series, MIN_BYTES)
        leak = MemoryGrowth(
            growth,
            growth_p_value(series),
            grows or bool(holder and holder.graph),
            series=series,
            steps=len(series),
            where="device" if self.tools.on_device else "host",
        )
        if holder is not None:
            leak.holder, leak.place, leak.graph = holder.holder, holder.place, holder.graph
            leak.tensors_a_step = holder.tensors_a_step
        has_grown = max(resident, default=0) - min(resident, default=0) > MIN_RESIDENT_BYTES
        host = MemoryGrowth(
            slope(resident),
            growth_p_value(resident),
            keeps_growing(resident, MAX_CHANCE) and has_grown,
            series=resident,
            steps=len(resident),
        )
        largest = self.finder.growing_container() if host.leaking else None
        if largest is not None:
            host.holder, host.place = largest.holder, largest.place
        return {"leak": leak.to_json(), "host_growth": host.to_json()}
