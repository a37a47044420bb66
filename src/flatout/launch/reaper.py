"""The processes of a launch, and the reaper: a process that ends all of them if the launcher is killed.

Every process of a launch has FLATOUT_LAUNCH in its environment. That includes loader workers, programs that
ranks start, and processes that left the group or lost their parent. The kernel kills a rank with its launcher
(PR_SET_PDEATHSIG). This is not used for the children of ranks: the signal arrives when the *thread* that
started a child ends (prctl(2)). In healthy programs it would kill daemons, and the workers of a loader that a
thread created.
"""

import os
import select
import shutil
import signal

LAUNCH_VARIABLE = "FLATOUT_LAUNCH"  # supervision uses another name, because a launch may run inside it
MAX_SCANS, SCAN_PAUSE_S = 60, 0.02
IDLE_ROUNDS = 3  # a process may fork during a scan


def members(folder: str, name: str = LAUNCH_VARIABLE) -> list[int]:
    """The running processes of a launch, except this one.

    Other users' processes are unreadable and not ours."""
    entry, pids = f"{name}={folder}".encode(), []
    for number in os.listdir("/proc"):
        if not number.isdigit() or int(number) == os.getpid():
            continue
        try:
            with open(f"/proc/{number}/environ", "rb") as environ:
                if entry in environ.read().split(b"\0"):
                    pids.append(int(number))
        except OSError:
            continue
    return pids


def end_members(folder: str, name: str = LAUNCH_VARIABLE) -> list[int]:
    """Kill every process of a launch. Return those that survive (a driver holds them in the kernel)."""
    idle_rounds, pids = 0, members(folder, name)
    for _ in range(MAX_SCANS):
        for number in pids:
            try:
                os.kill(number, signal.SIGKILL)
            except OSError:
                continue
        idle_rounds = 0 if pids else idle_rounds + 1
        if idle_rounds == IDLE_ROUNDS:
            return []
        select.select([], [], [], SCAN_PAUSE_S)
        pids = members(folder, name)
    return pids


class Reaper:
    """The reaper: a process in its own session that waits for the launcher to exit.

    Create it before the first rank and before any thread."""

    def __init__(self, folder: str, name: str = LAUNCH_VARIABLE) -> None:
        read_end, self._write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _wait_and_reap(folder, name, read_end)
            finally:
                os._exit(0)
        os.close(read_end)

    def dismiss(self) -> None:
        """Stop the reaper: the launch is over, and the remaining processes may run on."""
        try:
            os.write(self._write_end, b".")
            os.close(self._write_end)
            os.waitpid(self._pid, 0)
        except OSError:
            pass  # the reaper was killed


def _wait_and_reap(folder: str, name: str, read_end: int) -> None:
    os.setsid()  # so that stopping the launcher's group does not stop the reaper
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)  # so that readers of the launcher's output do not wait for the reaper
    os.closerange(3, read_end)
    # including its own copy of the other end
    os.closerange(read_end + 1, max(read_end + 2, os.sysconf("SC_OPEN_MAX")))
    if os.read(read_end, 1):
        return
    end_members(folder, name)
    shutil.rmtree(folder, ignore_errors=True)
