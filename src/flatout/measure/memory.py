"""Memory by kind over one step, from the allocations that a profiler recorded.

The kinds are parameters, gradients, optimizer state, inputs and saved activations. Everything else is
``other``: temporary values, and tensors held by the program.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.schema.profile import MEMORY_KINDS, MemoryProfile, MemorySample

if TYPE_CHECKING:
    from torch import device as Device

MAX_TIMELINE_POINTS = 160


@dataclass
class MemoryMoment:
    """Known bytes by kind at ``ns`` of the recording's clock."""

    ns: int
    kinds: dict[str, int]
    modules: dict[str, int] = field(default_factory=dict)


def allocations(events: Iterable[Any], device: int | None) -> list[tuple[int, int]]:
    """Return (ns, bytes) of each allocation in order of time. Freed blocks have negative sizes.

    ``device`` is the number of a device, or None for the host.
    """
    return sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]"
        and (None if str(event.device_type()).endswith(".CPU") else event.device_index()) == device
    )


def reserved_for_graphs(torch: ModuleType, device: Device) -> int:
    """The bytes in pools of CUDA graphs on ``device`` that the allocator does not count as allocated.

    Recorded passes compute in these pools.
    """
    return sum(
        int(segment["total_size"]) - int(segment["allocated_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def running_totals(changes: Sequence[tuple[int, int]], initial_bytes: int) -> list[tuple[int, int]]:
    """Return (ns, bytes in use) after each change. ``initial_bytes`` bytes are in use at the start."""
    total, totals = initial_bytes, []
    for ns, change in changes:
        total += change
        totals.append((ns, total))
    return totals


def bytes_at(totals: Sequence[tuple[int, int]], ns: int, initial_bytes: int) -> int:
    """The bytes in use at a moment."""
    index = bisect_right(totals, ns, key=lambda pair: pair[0])
    return totals[index - 1][1] if index else initial_bytes


def step_memory(
    device: str,
    totals: Sequence[tuple[int, int]],
    initial_bytes: int,
    moments: Sequence[MemoryMoment],
    start_ns: int,
    end_ns: int,
) -> MemoryProfile:
    """The memory of the step between ``start_ns`` and ``end_ns``.

    The result has the peak, its composition, and a timeline of at most ``MAX_TIMELINE_POINTS`` points.
    """
    inside = [(ns, total) for ns, total in totals if start_ns <= ns <= end_ns] or [
        (start_ns, bytes_at(totals, start_ns, initial_bytes))
    ]
    peak_ns, peak = max(inside, key=lambda pair: pair[1])
    known = [moment for moment in moments if moment.ns <= end_ns] or [MemoryMoment(start_ns, {})]
    peak_index = max(0, bisect_right([moment.ns for moment in known], peak_ns) - 1)
    result = MemoryProfile(device, peak, with_other(known[peak_index].kinds, peak))
    fullest_moment = max(
        (moment for moment in known if moment.ns >= start_ns),
        key=lambda moment: sum(moment.modules.values()),
        default=known[peak_index],
    )
    result.by_module = dict(sorted(fullest_moment.modules.items(), key=lambda item: -item[1]))
    points = [(moment.ns, moment.kinds) for moment in known if moment.ns >= start_ns]
    points.append((peak_ns, known[peak_index].kinds))
    points.sort(key=lambda point: point[0])
    stride = max(1, len(points) // MAX_TIMELINE_POINTS)
    sampled = [point for index, point in enumerate(points) if index % stride == 0 or point[0] == peak_ns]
    result.timeline = [
        MemorySample(
            (ns - start_ns) / 1e6,
            with_other(kinds, peak if ns == peak_ns else bytes_at(totals, ns, initial_bytes)),
        )
        for ns, kinds in sampled
    ]
    return result


def with_other(kinds: Mapping[str, int], total: int) -> dict[str, int]:
    """All known kinds, with ``other`` for the rest of the memory in use."""
    known = {kind: int(kinds[kind]) for kind in MEMORY_KINDS if kinds.get(kind)}
    known["other"] = max(0, total - sum(value for kind, value in known.items() if kind != "fragmentation"))
    return known
