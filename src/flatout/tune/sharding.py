"""Whether weights, gradients and optimizer state are to be divided over the ranks: by what one process was seen to hold of them, and what a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatout.plan.facts import Facts
from flatout.plan.plan import Choice
from flatout.plan.records import TrialRecord

LEVER = "sharding"
AUTO, ALWAYS, NEVER = "auto", "always", "never"
ROOM = 0.5  # of what a rank has; activations, what kernels take for themselves and the rest of the program need the other half
WORTH_SAYING = 0.1
RAN_OUT = ("OutOfMemoryError", "CUDA out of memory", "can't allocate memory", "MemoryError")
KILLED = (-9, 137)


@dataclass(frozen=True)
class Verdict:
    """``sentence`` has both figures; empty where they are far apart and nothing is divided."""

    divides: bool
    sentence: str = ""


def choices(divides: bool) -> tuple[Choice, ...]:
    return (Choice(LEVER, {"over": "node"}),) if divides else ()


def ran_out(record: TrialRecord) -> bool:
    """Whether a program ended for want of memory, as far as its last words and its exit code tell."""
    return record.exit_code in KILLED or any(word in f"{record.reason}\n{record.log_tail}" for word in RAN_OUT)


def memory_of_a_rank(facts: Facts, procs: int, device: str) -> tuple[int, str]:
    """Bytes, and whose they are; 0 where that is not known."""
    if device == "cuda":
        return min((gpu.memory_bytes for gpu in facts.gpus), default=0), "a GPU"
    return facts.memory_bytes // procs, f"a rank (the machine's memory over {procs})"


def verdict(wish: str, held: Mapping[str, int], device: str, facts: Facts, procs: int) -> Verdict:
    """``held``: bytes of weights, gradients and optimizer state in one process."""
    total = sum(held.values())
    has, whose = memory_of_a_rank(facts, procs, device)
    divides = wish == ALWAYS or (wish == AUTO and bool(has) and total > ROOM * has)
    if not divides and (not has or total < WORTH_SAYING * has):
        return Verdict(False)
    parts = ", ".join(f"{name} {legible(size)}" for name, size in held.items())
    figures = f"weights, gradients and optimizer state take {legible(total)} ({parts}); {whose} has {legible(has) if has else 'memory that is not known here'}"
    if not divides:
        return Verdict(False, f"{figures}: each rank keeps all of them" + (" (--shard always divides them)" if wish == AUTO else ""))
    return Verdict(True, f"{figures}: each of the {procs} ranks keeps a part of them" + (", as asked for" if wish == ALWAYS else ""))


def legible(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
