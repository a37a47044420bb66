"""Find the rank of a launch that failed first, and report it.

Works on the order of events; touches no process."""

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAILING, EXITING, EXITED = "failing", "leaving", "ended"
MAX_SHOWN = 16_000  # characters of a rank's output
SHOWN_LINES = 30

# Errors of a rank that lost another one: from gloo, NCCL, torch's stores and flatout's Loop.
LOST_ANOTHER = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed|remote process exited|ncclRemoteError|Broken pipe|Socket closed"
    r"|recvValue failed|sendBytes failed|the ranks have lost each other|rank \d+ has ended the training"
)
# torch's prefix of each traceback line once there is a process group
PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


@dataclass(frozen=True)
class RankEvent:
    """An event: ``rank`` is exiting (after an uncaught exception or the end of its program), or has exited.

    ``from_rank`` is False if a program that the rank started reports it; that counts only if the rank fails too.
    ``asked_to_exit``: by the launcher, so the event means nothing."""

    rank: int
    kind: str
    code: int | None = None  # of a rank that has exited; -n is signal n
    from_rank: bool = True
    asked_to_exit: bool = False
    killed: bool = False  # by the launcher


def first_failed(events: Sequence[RankEvent], lost_another: Callable[[int], bool]) -> int | None:
    """The rank that failed first, or None.

    ``lost_another(rank)`` is whether its error is the loss of another rank. Of two exceptions the first
    uncaught one is the cause. A rank that is killed closes its connections before its exit can be observed,
    and one that calls `sys.exit` long before. So every other failure takes precedence over the loss of
    another rank."""
    exits = {event.rank: event for event in events if event.kind == EXITED}
    failures: list[tuple[bool, int, int]] = []
    for position, event in enumerate(events):
        exit_event = exits.get(event.rank)
        failed = exit_event is not None and exit_event.code != 0 and not exit_event.killed
        if event.asked_to_exit or any(rank == event.rank for _, _, rank in failures):
            continue
        if event.kind == FAILING and (event.from_rank or failed):
            failures.append((lost_another(event.rank), position, event.rank))
        elif event.kind in (EXITING, EXITED) and event.from_rank and failed:
            failures.append((False, position, event.rank))
    return min(failures)[2] if failures else None


def exit_code(code: int) -> int:
    """The exit code as in a shell: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def headline(rank: int, host: str, pid: int, code: int, printed: bool) -> str:
    """The line that names the failure; ``printed`` is whether output follows it."""
    end = ":" if printed else "."
    return f"rank {rank} ({host}, process {pid}) failed first, {how_ended(code)}{end}"


def how_ended(code: int) -> str:
    return f"by {signal_name(-code)} (exit code {exit_code(code)})" if code < 0 else f"with exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_of_output(traceback: str, printed: str) -> str:
    """The end of a rank's output: from its last traceback, explanation included, or its last lines."""
    printed = PREFIX.sub("", printed)
    position = printed.rfind(traceback.strip()) if traceback else -1
    if traceback and position < 0:
        return traceback[-MAX_SHOWN:].rstrip()
    text = printed[position:] if position >= 0 else "\n".join(printed.rstrip().splitlines()[-SHOWN_LINES:])
    return text[-MAX_SHOWN:].rstrip()
