"""What belongs to a launch, and the keeper: a process beside the launcher that ends all of it where the launcher is killed outright.

Every process of a launch has FLATOUT_GANG in its environment, also loader workers, programs that ranks start, and what has left their group or lost its
parent. The kernel ends a rank with its launcher (PR_SET_PDEATHSIG). It is not asked to do so for the children of ranks: the signal comes when the *thread*
ends that started a child (prctl(2)), which would kill the workers of a loader that a thread has made, and daemons, in programs that are well.
"""

from __future__ import annotations

import os
import select
import shutil
import signal

GANG = "FLATOUT_GANG"  # what supervision starts is known by another name: a launch may be inside
ROUNDS, PAUSE_S = 60, 0.02
QUIET_ROUNDS = 3  # a process may be forking as we look


def members(gang: str, name: str = GANG) -> list[int]:
    """Living processes of a launch, but this one. Other people's cannot be read, and are not ours."""
    mark, found = f"{name}={gang}".encode(), []
    for number in os.listdir("/proc"):
        if not number.isdigit() or int(number) == os.getpid():
            continue
        try:
            with open(f"/proc/{number}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    found.append(int(number))
        except OSError:
            continue
    return found


def end_members(gang: str, name: str = GANG) -> list[int]:
    """End every process of a launch; answers those that do not go (a driver holds them in the kernel)."""
    quiet, found = 0, members(gang, name)
    for _ in range(ROUNDS):
        for number in found:
            try:
                os.kill(number, signal.SIGKILL)
            except OSError:
                continue
        quiet = 0 if found else quiet + 1
        if quiet == QUIET_ROUNDS:
            return []
        select.select([], [], [], PAUSE_S)
        found = members(gang, name)
    return found


class Keeper:
    """Waits in a session of its own for the launcher's end. Made before the first rank and before any thread."""

    def __init__(self, gang: str, name: str = GANG) -> None:
        ours, self._line = os.pipe()
        self._number = os.fork()
        if self._number == 0:
            try:
                _keep(gang, name, ours)
            finally:
                os._exit(0)
        os.close(ours)

    def dismiss(self) -> None:
        """The launch is over, and whatever still runs is meant to."""
        try:
            os.write(self._line, b".")
            os.close(self._line)
            os.waitpid(self._number, 0)
        except OSError:
            pass  # somebody has killed it


def _keep(gang: str, name: str, line: int) -> None:
    os.setsid()  # a stop of the launcher's group must not hold it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)  # whoever reads the launcher's output must not wait for us
    os.closerange(3, line)
    os.closerange(line + 1, max(line + 2, os.sysconf("SC_OPEN_MAX")))  # its own copy of the other end among them
    if os.read(line, 1):
        return
    end_members(gang, name)
    shutil.rmtree(gang, ignore_errors=True)
