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
STATE_SHARE = 0.5
REPORTED_SHARE = 0.1
OUT_OF_MEMORY_TEXTS = ("OutOfMemoryError", "CUDA out of memory", "can't allocate memory", "MemoryError")
KILLED_EXIT_CODES = (-9, 137)


@dataclass(frozen=True)
class ShardingDecision:
    """Whether to shard.

    ``sentence`` has both figures; it is empty if memory is ample and nothing is sharded.
    """

    shards: bool
    sentence: str = ""


def choices(shards: bool) -> tuple[Choice, ...]:
    return (Choice(LEVER, {"over": "node"}),) if shards else ()


def ran_out_of_memory(record: TrialRecord) -> bool:
    """Whether a program ended because it ran out of memory, judging by its last output and its exit code."""
    return record.exit_code in KILLED_EXIT_CODES or any(
        word in f"{record.reason}\n{record.log_tail}" for word in OUT_OF_MEMORY_TEXTS
    )


def rank_memory(facts: Facts, procs: int, device: str) -> tuple[int, str]:
    """A rank's memory in bytes and its description; 0 if unknown."""
    if device == "cuda":
        return min((gpu.memory_bytes for gpu in facts.gpus), default=0), "a GPU"
    return facts.memory_bytes // procs, f"a rank (the machine's memory over {procs})"


def decide(
    request: str, state_bytes: Mapping[str, int], device: str, facts: Facts, procs: int
) -> ShardingDecision:
    """Decide from ``state_bytes``, the bytes of weights, gradients and optimizer state in one process."""
    total = sum(state_bytes.values())
    rank_bytes, rank_words = rank_memory(facts, procs, device)
    shards = request == ALWAYS or (request == AUTO and bool(rank_bytes) and total > STATE_SHARE * rank_bytes)
    if not shards and (not rank_bytes or total < REPORTED_SHARE * rank_bytes):
        return ShardingDecision(False)
    parts = ", ".join(f"{name} {size(part_bytes)}" for name, part_bytes in state_bytes.items())
    figures = f"weights, gradients and optimizer state take {size(total)} ({parts}); {rank_words} has {size(rank_bytes) if rank_bytes else 'an unknown amount of memory'}"
    if not shards:
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
