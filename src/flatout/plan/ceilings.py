"""What this machine can do at most, as it was measured: the roofs that a step is held against.

Figures are per second (FLOPs, bytes) or seconds, as the end of their name says. A figure that could not be had has no value, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.plan.records import Record

CEILINGS_SCHEMA = 1

# The names, in the order in which they are measured and shown. "tf32" is float32 data multiplied by Tensor Cores.
MATMUL_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
NAMES = (
    *(f"matmul_{dtype}_flops" for dtype in MATMUL_DTYPES),  # a multiplication and an addition are two
    "memory_bytes_per_s",  # read and written together, the better of copy and triad
    "memory_copy_bytes_per_s",  # a = b
    "memory_triad_bytes_per_s",  # a = b + scalar * c
    "host_to_device_pinned_bytes_per_s",
    "host_to_device_pageable_bytes_per_s",
    "disk_read_bytes_per_s",
    "loader_start_s",  # from iter(loader) with one worker to its first batch
    "all_reduce_bytes_per_s",  # of the tensor, between two processes
)


@dataclass
class Ceiling(Record):
    """One figure: of a rate the best of ``n`` repetitions, of a time their median; ``low`` and ``high`` are the quartiles of all.

    ``value`` is None where it was not run, and ``note`` says why.

    ``device`` is "cpu" or "cuda"; ``note`` also holds what a reader must know (sizes, threads, whether the page cache was out of the way).
    """

    name: str
    device: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    note: str = ""


@dataclass
class CeilingsRecord(Record):
    key: str  # of the machine, measure/ceilings.machine_key
    schema: int = CEILINGS_SCHEMA
    created: str = ""
    flatout: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    threads: int = 0  # of one operation, as torch chose it
    busy_cores: float | None = None  # what other programs took just before
    ceilings: list[Ceiling] = field(default_factory=list)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CeilingsRecord:
        """Raises TypeError for what is JSON, and no record of ceilings."""
        record = super().from_json(data)
        if not isinstance(record.ceilings, list):
            raise TypeError("ceilings are a list")
        record.ceilings = [c if isinstance(c, Ceiling) else Ceiling.from_json(c) for c in record.ceilings]
        return record

    def values(self, device: str) -> dict[str, float]:
        """The figures of one device by name; those of the host (disk, loader, all-reduce, memory of the CPU) come with either.

        Where both have one of the same name, the device's own counts.
        """
        found: dict[str, float] = {}
        for each in sorted(self.ceilings, key=lambda c: c.device == device):
            if each.value is not None and (each.device == device or not each.name.startswith(("matmul_", "memory_"))):
                found[each.name] = each.value
        return found
