"""Which rank of a launch failed first, and what is said of it. Judged from signs in the order in which they came; no process is touched here."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAILING, LEAVING, ENDED = "failing", "leaving", "ended"
MOST_SHOWN = 16_000  # characters of what a rank printed
LINES_SHOWN = 30

# What a rank says that has lost another one: gloo, NCCL, torch's stores, and a Loop of ours.
LOST_ANOTHER = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed|remote process exited|ncclRemoteError|Broken pipe|Socket closed"
    r"|recvValue failed|sendBytes failed|the ranks have lost each other|rank \d+ has ended the training"
)
PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch puts it before each line of a traceback once a process group is made


@dataclass(frozen=True)
class Sign:
    """``rank`` is on its way out (an exception reached the top of it, its program is over), or has ended.

    ``own`` is False where a program that the rank started says so: that counts only where the rank fails as well. ``told`` is True where the launcher had
    told the rank to end before, so that nothing follows from it.
    """

    rank: int
    kind: str
    code: int | None = None  # of a rank that has ended; -n is signal n
    own: bool = True
    told: bool = False
    killed: bool = False  # its code is ours


def first_of(signs: Sequence[Sign], secondhand: Callable[[int], bool]) -> int | None:
    """The rank that failed first, None where none did. ``secondhand(rank)`` says whether its words are those of one that has lost another.

    Of two exceptions the one that came to the top first is the cause. A rank that dies without words closes its connections before anybody can hear
    of its end, and one that leaves (`sys.exit`) long before: so words of having lost another rank give way to every other failure.
    """
    ends = {sign.rank: sign for sign in signs if sign.kind == ENDED}
    found: list[tuple[bool, int, int]] = []
    for at, sign in enumerate(signs):
        end = ends.get(sign.rank)
        ended_badly = end is not None and end.code != 0 and not end.killed
        if sign.told or any(rank == sign.rank for _, _, rank in found):
            continue
        if sign.kind == FAILING and (sign.own or ended_badly):
            found.append((secondhand(sign.rank), at, sign.rank))
        elif sign.kind in (LEAVING, ENDED) and sign.own and ended_badly:
            found.append((False, at, sign.rank))
    return min(found)[2] if found else None


def exit_code(code: int) -> int:
    """As a shell would say it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def headline(rank: int, host: str, pid: int, code: int, printed: bool) -> str:
    """One line; ``printed`` says whether words follow it."""
    how = f"by {signal_name(-code)} (exit code {exit_code(code)})" if code < 0 else f"with exit code {code}"
    return f"rank {rank} ({host}, process {pid}) failed first, {how}{':' if printed else '.'}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown(traceback: str, printed: str) -> str:
    """What a person who did not see a rank's output gets of it: from its last traceback on, with what was explained below; else its last lines."""
    printed = PREFIX.sub("", printed)
    at = printed.rfind(traceback.strip()) if traceback else -1
    if traceback and at < 0:
        return traceback[-MOST_SHOWN:].rstrip()
    text = printed[at:] if at >= 0 else "\n".join(printed.rstrip().splitlines()[-LINES_SHOWN:])
    return text[-MOST_SHOWN:].rstrip()
