"""The gate on an amount of memory, such as 2 GB. It needs no interval: the largest peak of B is what it needs."""

from __future__ import annotations

from flatout.schema.compare import CompareRecord, Gate
from flatout.schema.sizes import size

NAME = "peak memory"


def memory_amount(record: CompareRecord, limit_bytes: int) -> Gate:
    """Judge whether every process of B stayed within the limit."""
    limit = size(limit_bytes)
    peak = record.b.peak_memory_bytes if record.b is not None else None
    if peak is None:
        return Gate(NAME, limit, "cannot tell", f"no {NAME} was measured")
    needed = f"the {NAME} of B is {size(peak)}"
    if peak > limit_bytes:
        return Gate(NAME, limit, "failed", f"{needed}: above the limit of {limit}")
    return Gate(NAME, limit, "passed", f"{needed}: within the limit of {limit}")
