"""Find the rank of a launch that failed first, and report it.

Works on the order of events; touches no process."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAILING, LEAVING, ENDED = "failing", "leaving", "ended"
MOST_SHOWN = 16_000  # characters of a rank's output
LINES_SHOWN = 30

# Errors of a rank that lost another one: from gloo, NCCL, torch's stores and flatout's Loop.
LOST_ANOTHER = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed|remote process exited|ncclRemoteError|Broken pipe|Socket closed"
    r"|recvValue failed|sendBytes failed|the ranks have lost each other|rank \d+ has ended the training"
)
PREFIX = re.compile(
    r"^\[rank\d+\]: ?", re.MULTILINE
)  # torch's prefix of each traceback line once there is a process group


@dataclass(frozen=True)
class RankEvent:
    """An event: ``rank`` is exiting (after an uncaught exception or the end of its program), or has exited.

    ``own`` is False if a program that the rank started reports it; that counts only if the rank fails too.
    ``info`` is True if the launcher had asked the rank to exit before, so that the event means nothing.
    """

    rank: int
    kind: str
    code: int | None = None  # of a rank that has exited; -n is signal n
    own: bool = True
    info: bool = False
    killed: bool = False  # by the launcher


def first_of(signs: Sequence[RankEvent], secondhand: Callable[[int], bool]) -> int | None:
    """Return the rank that failed first, or None.

    ``secondhand(rank)`` is whether its error is the loss of another rank. Of two exceptions the first
    uncaught one is the cause. A rank that is killed closes its connections before its exit can be observed,
    and one that calls `sys.exit` long before. So every other failure takes precedence over the loss of
    another rank.
    """
    ends = {sign.rank: sign for sign in signs if sign.kind == ENDED}
    found: list[tuple[bool, int, int]] = []
    for at, sign in enumerate(signs):
        end = ends.get(sign.rank)
        ended_badly = end is not None and end.code != 0 and not end.killed
        if sign.info or any(rank == sign.rank for _, _, rank in found):
            continue
        if sign.kind == FAILING and (sign.own or ended_badly):
            found.append((secondhand(sign.rank), at, sign.rank))
        elif sign.kind in (LEAVING, ENDED) and sign.own and ended_badly:
            found.append((False, at, sign.rank))
    return min(found)[2] if found else None


def exit_code(code: int) -> int:
    """Return the exit code as in a shell: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def headline(rank: int, host: str, pid: int, code: int, printed: bool, where: str = "") -> str:
    """Return the line that names the failure; ``printed`` is whether output follows it."""
    return (
        f"rank {rank} ({host}, process {pid}) failed first{where}, {how_ended(code)}{':' if printed else '.'}"
    )


def how_ended(code: int) -> str:
    return f"by {signal_name(-code)} (exit code {exit_code(code)})" if code < 0 else f"with exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown(traceback: str, printed: str) -> str:
    """Return the end of a rank's output: from its last traceback, explanation included, or its last lines."""
    printed = PREFIX.sub("", printed)
    at = printed.rfind(traceback.strip()) if traceback else -1
    if traceback and at < 0:
        return traceback[-MOST_SHOWN:].rstrip()
    text = printed[at:] if at >= 0 else "\n".join(printed.rstrip().splitlines()[-LINES_SHOWN:])
    return text[-MOST_SHOWN:].rstrip()
