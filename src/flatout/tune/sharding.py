"""Decides whether to shard weights, gradients and optimizer state, by their size and a rank's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatout.schema.facts import Facts
from flatout.schema.plan import Choice
from flatout.schema.records import TrialRecord
from flatout.schema.sizes import size

LEVER = "sharding"
AUTO, ALWAYS, NEVER = "auto", "always", "never"
# Of a rank's memory; activations, kernel workspaces and the rest of the program need the other half
ROOM = 0.5
WORTH_SAYING = 0.1
RAN_OUT = ("OutOfMemoryError", "CUDA out of memory", "can't allocate memory", "MemoryError")
KILLED = (-9, 137)


@dataclass(frozen=True)
class ShardingDecision:
    """Whether to shard.

    ``sentence`` has both figures; it is empty if memory is ample and nothing is sharded.
    """

    divides: bool
    sentence: str = ""


def choices(divides: bool) -> tuple[Choice, ...]:
    return (Choice(LEVER, {"over": "node"}),) if divides else ()


def ran_out(record: TrialRecord) -> bool:
    """Whether a program ended because it ran out of memory, judging by its last output and its exit code."""
    return record.exit_code in KILLED or any(
        word in f"{record.reason}\n{record.log_tail}" for word in RAN_OUT
    )


def memory_of_a_rank(facts: Facts, procs: int, device: str) -> tuple[int, str]:
    """Return a rank's memory in bytes and its description; 0 if unknown."""
    if device == "cuda":
        return min((gpu.memory_bytes for gpu in facts.gpus), default=0), "a GPU"
    return facts.memory_bytes // procs, f"a rank (the machine's memory over {procs})"


def verdict(request: str, held: Mapping[str, int], device: str, facts: Facts, procs: int) -> ShardingDecision:
    """Decide from ``held``, the bytes of weights, gradients and optimizer state in one process."""
    total = sum(held.values())
    has, whose = memory_of_a_rank(facts, procs, device)
    divides = request == ALWAYS or (request == AUTO and bool(has) and total > ROOM * has)
    if not divides and (not has or total < WORTH_SAYING * has):
        return ShardingDecision(False)
    parts = ", ".join(f"{name} {size(held_bytes)}" for name, held_bytes in held.items())
    figures = f"weights, gradients and optimizer state take {size(total)} ({parts}); {whose} has {size(has) if has else 'an unknown amount of memory'}"
    if not divides:
        return ShardingDecision(
            False,
            f"{figures}: each rank keeps a full copy"
            + (" (--shard always shards them)" if request == AUTO else ""),
        )
    return ShardingDecision(
        True,
        f"{figures}: each of the {procs} ranks keeps a shard"
        + (", as requested" if request == ALWAYS else ""),
    )
