"""The processes of a launch, and the reaper: a process that ends all of them if the launcher is killed.

Every process of a launch has FLATOUT_LAUNCH in its environment. That includes loader workers, programs that
ranks start, and processes that left the group or lost their parent. The kernel kills a rank with its launcher
(PR_SET_PDEATHSIG). This is not used for the children of ranks: the signal arrives when the *thread* that
started a child ends (prctl(2)). In healthy programs it would kill daemons, and the workers of a loader that a
thread created.
"""

from __future__ import annotations

import os
import select
import shutil
import signal

LOCAL_LAUNCHER = "FLATOUT_LAUNCH"  # supervision uses another name, because a launch may run inside it
ROUNDS, PAUSE_S = 60, 0.02
IDLE_ROUNDS = 3  # a process may fork during a scan


def members(local_launcher: str, name: str = LOCAL_LAUNCHER) -> list[int]:
    """Return the running processes of a launch, except this one.

    Other users' processes are unreadable and not ours."""
    mark, found = f"{name}={local_launcher}".encode(), []
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


def end_members(local_launcher: str, name: str = LOCAL_LAUNCHER) -> list[int]:
    """Kill every process of a launch. Return those that survive (a driver holds them in the kernel)."""
    quiet, found = 0, members(local_launcher, name)
    for _ in range(ROUNDS):
        for number in found:
            try:
                os.kill(number, signal.SIGKILL)
            except OSError:
                continue
        quiet = 0 if found else quiet + 1
        if quiet == IDLE_ROUNDS:
            return []
        select.select([], [], [], PAUSE_S)
        found = members(local_launcher, name)
    return found


class Reaper:
    """The reaper: a process in its own session that waits for the launcher to exit.

    Create it before the first rank and before any thread."""

    def __init__(self, local_launcher: str, name: str = LOCAL_LAUNCHER) -> None:
        ours, self._line = os.pipe()
        self._number = os.fork()
        if self._number == 0:
            try:
                _keep(local_launcher, name, ours)
            finally:
                os._exit(0)
        os.close(ours)

    def dismiss(self) -> None:
        """Stop the reaper: the launch is over, and the remaining processes may run on."""
        try:
            os.write(self._line, b".")
            os.close(self._line)
            os.waitpid(self._number, 0)
        except OSError:
            pass  # the reaper was killed


def _keep(local_launcher: str, name: str, line: int) -> None:
    os.setsid()  # so that stopping the launcher's group does not stop the reaper
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)  # so that readers of the launcher's output do not wait for the reaper
    os.closerange(3, line)
    os.closerange(
        line + 1, max(line + 2, os.sysconf("SC_OPEN_MAX"))
    )  # including its own copy of the other end
    if os.read(line, 1):
        return
    end_members(local_launcher, name)
    shutil.rmtree(local_launcher, ignore_errors=True)
