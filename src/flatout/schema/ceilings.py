"""Measured performance ceilings of a machine, the basis of rooflines.

The suffix of a name gives its unit: FLOPs or bytes per second. An unavailable figure has no value
and a note that says why.
"""

from dataclasses import dataclass, field
from typing import Any

from flatout.schema.records import Record

CEILINGS_SCHEMA = 1

# In the order in which they are measured and shown. "tf32" is float32 data multiplied by Tensor Cores.
MATMUL_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")


@dataclass
class Ceiling(Record):
    """One measured ceiling.

    ``value`` is the best of ``n`` repetitions, ``low`` and ``high`` are the quartiles. ``value`` is None if the
    benchmark did not run; ``note`` says why, or the sizes. ``device`` is "cpu" or "cuda"."""

    name: str
    device: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    note: str = ""


@dataclass
class CeilingsRecord(Record):
    key: str  # of the machine, see measure/ceilings.machine_key
    schema: int = CEILINGS_SCHEMA
    created: str = ""
    flatout: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    threads: int = 0  # per operation, as chosen by torch
    busy_cores: float | None = None  # cores used by other processes just before
    ceilings: list[Ceiling] = field(default_factory=list)

    def values(self, device: str) -> dict[str, float]:
        """Return the figures of a device by name."""
        return {
            ceiling.name: ceiling.value
            for ceiling in self.ceilings
            if ceiling.device == device and ceiling.value is not None
        }
