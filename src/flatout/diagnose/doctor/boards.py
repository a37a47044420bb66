"""Checks each GPU by itself, and joins the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatout.diagnose.doctor.check import CheckOutcome, not_seen
from flatout.diagnose.doctor.nvidia_smi import GpuStatus, listing
from flatout.schema.machine_snapshot import MachineSnapshot


def each_board(snapshot: MachineSnapshot, judge: Callable[[GpuStatus], CheckOutcome]) -> CheckOutcome:
    """The worst of the answers for each GPU. If all are ok, the shared answer."""
    seen = listing(snapshot)
    if seen is None or not seen.boards:
        return not_seen("nvidia-smi did not list the GPUs")
    answers = [(board, judge(board)) for board in seen.boards]
    order = ("problem", "warning", "not seen", "note", "ok")
    worst = min((answer for _, answer in answers), key=lambda answer: order.index(answer.verdict))
    said = list(dict.fromkeys(f"GPU {b.index}: {a.seen}" for b, a in answers if a.verdict == worst.verdict))
    return CheckOutcome(worst.verdict, _together(answers, worst, said), worst.fix, worst.evidence)


def _together(answers: Sequence[tuple[GpuStatus, CheckOutcome]], worst: CheckOutcome, said: list[str]) -> str:
    if len({answer.seen for _, answer in answers}) == 1 and len(answers) > 1:
        return f"each of {len(answers)} GPUs: {worst.seen}"
    return "; ".join(said[:4]) + (f"; and {len(said) - 4} more" if len(said) > 4 else "")


def short_name(name: str) -> str:
    """The program's name without its folder and arguments."""
    return (name.split() or ["?"])[0].rpartition("/")[2] or "?"
