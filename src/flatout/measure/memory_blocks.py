"""Track memory blocks as they are allocated and freed: bytes in use, and the composition of the peak.

Pure bookkeeping. Time is the number of the event. The kind of a block may become known after its allocation.
"""

from collections import Counter
from dataclasses import dataclass

CUDA_ROUNDING_BYTES = 512  # kMinBlockSize of torch's caching allocator (c10/core/CachingDeviceAllocator.h)
TEMPORARY = "temporary"


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A memory block. ``freed_at`` is the event that freed it, or None while it lives."""

    size_bytes: int
    kind: str
    module: str
    allocated_at: int
    freed_at: int | None = None


@dataclass(frozen=True)
class Peak:
    """Peak of bytes in use, by kind, and the activations by module at their own maximum."""

    peak_bytes: int
    kinds: dict[str, int]
    by_module: dict[str, int]


class MemoryBlockTracker:
    """Tracks blocks.

    ``rounding_bytes`` is the granularity of the allocator: block sizes are rounded up to a multiple of it.
    """

    def __init__(self, rounding_bytes: int = 1) -> None:
        self.rounding_bytes = rounding_bytes
        self.events = 0
        self.in_use_bytes = 0
        self._blocks: list[MemoryBlock] = []
        self.reset_peak()

    def reset_peak(self) -> None:
        """Start the search for the peak."""
        self._blocks = [block for block in self._blocks if block.freed_at is None]
        self._peak_bytes, self._peak_event = self.in_use_bytes, self.events
        self._start_event = self.events

    def allocate(self, size_bytes: int, kind: str = TEMPORARY, module: str = "") -> MemoryBlock:
        self.events += 1
        rounded = -(-size_bytes // self.rounding_bytes) * self.rounding_bytes
        block = MemoryBlock(rounded, kind, module, self.events)
        self._blocks.append(block)
        self.in_use_bytes += rounded
        if self.in_use_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_event = self.in_use_bytes, self.events
        return block

    def free(self, block: MemoryBlock) -> None:
        if block.freed_at is None:
            self.events += 1
            block.freed_at = self.events
            self.in_use_bytes -= block.size_bytes

    def classify_survivors(self, kind: str, since: int) -> None:
        """Set the kind of the temporary blocks that were allocated after the event ``since`` and still live."""
        for block in reversed(self._blocks):
            if block.allocated_at <= since:
                break
            if block.freed_at is None and block.kind == TEMPORARY:
                block.kind = kind

    def peak(self) -> Peak:
        """The peak since ``reset_peak``."""
        kinds: Counter[str] = Counter()
        for block in self._live_blocks_at(self._peak_event):
            kinds[block.kind] += block.size_bytes
        modules: Counter[str] = Counter()
        for block in self._live_blocks_at(self._fullest_event()):
            if block.kind == "activations":
                modules[block.module] += block.size_bytes
        return Peak(
            self._peak_bytes,
            {kind: size for kind, size in kinds.items() if size},
            {name: size for name, size in modules.most_common() if size},
        )

    def _live_blocks_at(self, event: int) -> list[MemoryBlock]:
        return [
            block
            for block in self._blocks
            if block.allocated_at <= event and (block.freed_at is None or block.freed_at > event)
        ]

    def _fullest_event(self) -> int:
        changes = [
            (block.allocated_at, block.size_bytes) for block in self._blocks if block.kind == "activations"
        ]
        changes += [
            (block.freed_at, -block.size_bytes)
            for block in self._blocks
            if block.kind == "activations" and block.freed_at is not None
        ]
        total, max_bytes, event = 0, 0, self._start_event
        for changed_at, change in sorted(changes):
            total += change
            if changed_at <= self._start_event or total > max_bytes:
                max_bytes, event = total, max(changed_at, self._start_event)
        return event
