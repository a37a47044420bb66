"""Place operators under the roofline: how close each comes to the machine's limits, and which limit applies.

The roofline: no operator is faster than its FLOPs over the peak of its dtype, or than its bytes over the
memory bandwidth (Williams, Waterman and Patterson, 2009). Both peaks are measured. Without them there is no
result.
"""

from collections.abc import Mapping, Sequence

from flatout.schema.profile import Operation

LAUNCH_OVERHEAD_US = 20.0  # a shorter call, far below both roofs, is dominated by its launch overhead
FAR_BELOW_SHARE = 0.25


def fill_roofline(operations: Sequence[Operation], ceilings: Mapping[str, float], tf32: bool = False) -> None:
    """Fill in ``roofline`` and ``limit`` of each operation.

    ``ceilings`` are by name, and empty if never measured.
    """
    for operation in operations:
        operation.roofline, operation.limit = _share(operation, ceilings, tf32)


def _peak(operation: Operation, ceilings: Mapping[str, float], tf32: bool) -> float | None:
    dtype = operation.dtypes[0] if operation.dtypes else "float32"
    return ceilings.get(f"matmul_{'tf32' if tf32 and dtype == 'float32' else dtype}_flops")


def _share(operation: Operation, ceilings: Mapping[str, float], tf32: bool) -> tuple[float | None, str]:
    own_ms = operation.self_ms
    bandwidth = ceilings.get("memory_bytes_per_s")
    if not own_ms or not bandwidth or not operation.moved_bytes:
        return None, "unknown"
    memory_ms = operation.moved_bytes / bandwidth * 1000
    compute_ms = 0.0
    if operation.flops:
        peak = _peak(operation, ceilings, tf32)
        if peak is None:
            return None, "unknown"
        compute_ms = operation.flops / peak * 1000
    share = min(1.0, max(memory_ms, compute_ms) / own_ms)
    if share < FAR_BELOW_SHARE and 1000 * own_ms / max(operation.calls, 1e-9) < LAUNCH_OVERHEAD_US:
        return share, "launch"
    return share, "compute" if compute_ms > memory_ms else "memory"


def flops_a_step(operations: Sequence[Operation]) -> float | None:
    """The total of all counted FLOPs, or None if there are none."""
    known = [operation.flops for operation in operations if operation.flops]
    return sum(known) if known else None


def utilisation(
    operations: Sequence[Operation], step_ms: float, ceilings: Mapping[str, float], tf32: bool = False
) -> float | None:
    """The MFU: the ideal time of the counted FLOPs over the step time.

    The ideal time is at the measured peaks of the dtypes.
    """
    ideal_ms = 0.0
    for operation in operations:
        if operation.flops:
            peak = _peak(operation, ceilings, tf32)
            if peak is None:
                return None
            ideal_ms += operation.flops / peak * 1000
    return ideal_ms / step_ms if ideal_ms and step_ms > 0 else None
