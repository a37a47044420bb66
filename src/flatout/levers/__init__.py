"""The levers: one optimisation per file, and the table that lists them in the order in which they act.

Runs in: the user's program (applies, apply), flatout.Loop, and the flatout command (the table, environment).
Imports: schema, job, data, distributed, kernels.
Start with: schema/lever.py (Lever), then tf32.py. To add a lever, add one file, and its name here.
"""

from collections.abc import Collection, Container, Iterator
from importlib import import_module

from flatout.schema.errors import PlanError
from flatout.schema.lever import Lever
from flatout.schema.plan import Plan


class Table(Collection[Lever]):
    """Levers by name. Each is imported when it is reached: a run imports only those of its plan."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __iter__(self) -> Iterator[Lever]:
        return (import_module(f"{__name__}.{name}").LEVER for name in self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, lever: object) -> bool:
        return lever in tuple(self)

    def of(self, names: Container[str]) -> "Table":
        """Return the levers of these names, in the same order."""
        return Table(*(name for name in self.names if name in names))


TABLE = Table(
    "allocator",
    "malloc",
    "threads",
    "gc_pause",
    "debug_off",
    "batch_size",
    "loader",
    "cached_prefix",
    "batched_transforms",
    "resident_data",
    "device_prefetch",
    "data_parallel",
    "sharding",
    "ddp_flags",
    "comm_compression",
    "gradient_buckets",
    "tf32",
    "cudnn_benchmark",
    "reduced_precision",
    "channels_last",
    "autocast",
    "attention",
    "fused_ops",
    "compile",
    "memory_budget",
    "inplace",
    "recompute",
    "fused_optimizer",
    "graphs",
    "early_values",
)


def checked(plan: Plan, source: object = "the plan") -> Plan:
    """Return this plan. Raises PlanError if a lever does not accept its value."""
    for choice in plan:
        for lever in TABLE.of({choice.name}):
            try:
                lever.check(choice.value)
            except TypeError as error:
                raise PlanError(f"{source}: {error}") from None
    return plan
