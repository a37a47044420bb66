"""Watches whether flatout enters a program, and says why if it does not.

Python reads flatout's start-up hook before the first line of a script (agent/site/sitecustomize.py). The hook
reports its process in the file FLATOUT_ENTERED. A Python process that is not reported, and starts no other
Python process, shows in its arguments and its environment what disables the hook.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flatout.job.temporary import owner
from flatout.launch.command import is_python, parse_python
from flatout.launch.environment import ENTERED, SITE
from flatout.measure.clock import seconds

KNOWN_CAUSE_S, UNKNOWN_CAUSE_S = (
    3.0,
    9.0,
)  # how long a Python process may take to report: with, and without a known cause
SCAN_S = 0.5  # looking through the process table takes milliseconds
POLL_S = 0.02
MAX_REPORT_BYTES = 1 << 16
NO_REPORT = (
    "no Python process of this command loaded flatout (a container, env -i, python -I, -E or -S prevent it)"
)


@dataclass(frozen=True)
class PythonProcess:
    """``environment`` is None if the process belongs to another user."""

    pid: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] | None

    @property
    def name(self) -> str:
        return Path(self.argv[0]).name if self.argv else "python"


def why_not_entered(process: PythonProcess) -> str:
    """Why flatout cannot enter a Python process, with the next command; "" if nothing is found."""
    option, environment = parse_python(process.argv).disables, process.environment
    if option:
        return f"`{process.name} {option}` disables flatout; remove {option}"
    if environment is None:
        return (
            "its Python runs as another user (sudo, su), whose environment has nothing of flatout. "
            "Start flatout as that user: sudo flatout ..."
        )
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    if ENTERED not in environment:
        return (
            "its environment was cleared before Python started (env -i, sudo, a container). "
            "Keep PYTHONPATH and all variables that begin with FLATOUT_, or start flatout inside"
        )
    if str(SITE) not in path:
        return (
            f"a launcher replaced PYTHONPATH by {environment.get('PYTHONPATH', '')!r}. "
            "Let it add its folders instead: PYTHONPATH=folder:$PYTHONPATH"
        )
    for folder in path[: path.index(str(SITE))]:
        if (hiding := Path(folder, "sitecustomize.py")).is_file():
            return f"{hiding} hides flatout's own sitecustomize. Move {folder} behind the other folders of PYTHONPATH"
    return ""


class EntryWatch:
    """Finds out whether a process of a program reports to the file ``entered``, which this makes.

    ``cause`` is empty until a cause is certain."""

    def __init__(self, entered: Path) -> None:
        self.path = entered
        # held open, because a short program removes the folder at its end
        self._handle = os.open(entered, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self.cause = ""
        self._processes: dict[int, tuple[float, PythonProcess]] = {}
        self._scanned_s = seconds()  # a program that is entered never needs a look

    @property
    def reports(self) -> dict[int, str]:
        """What each process reported last: "ok", "old 3.8.18", or an error."""
        lines = os.pread(self._handle, MAX_REPORT_BYTES, 0).decode(errors="replace").splitlines()
        parts = (line.partition(" ") for line in lines)
        return {int(pid): report for pid, _, report in parts if pid.isdigit() and report}

    def is_decided(self, root: int) -> bool:
        """Whether it is decided: flatout is in the program of process ``root``, or ``cause`` says why not."""
        reports = self.reports
        if "ok" in reports.values():
            return True
        now = seconds()
        if now - self._scanned_s < SCAN_S:
            return False
        self._scanned_s = now
        running, parents = python_processes(root)
        for process in running:
            if any("from flatout.launch." in word for word in process.argv):
                continue  # a supervisor, whose child is the program
            first_s, _ = self._processes.setdefault(process.pid, (now, process))
            if process.pid in parents:
                continue
            cause = self._cause(process, reports)
            if now - first_s > (KNOWN_CAUSE_S if cause else UNKNOWN_CAUSE_S):
                self.cause = cause or (
                    f"{' '.join(process.argv[:3])} (pid {process.pid}) did not load {SITE / 'sitecustomize.py'}. "
                    "`flatout doctor` checks this installation"
                )
        return bool(self.cause)

    def cause_at_end(self) -> str:
        """Why flatout was in no process of a program that has ended; "" if it was in one."""
        reports = self.reports
        if "ok" in reports.values():
            return ""
        causes = [self._cause(process, reports) for _, process in self._processes.values()]
        if reports:
            causes.append(_reported(next(reversed(reports.values()))))
        return next(filter(None, causes), NO_REPORT)

    def close_inherited_files(self) -> None:
        """Close what this process has inherited, such as the pipe that somebody reads to its end."""
        os.closerange(3, self._handle)
        os.closerange(self._handle + 1, 1024)

    def close(self) -> None:
        """Remove the file. Safe to call again."""
        self.path.unlink(missing_ok=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _cause(self, process: PythonProcess, reports: Mapping[int, str]) -> str:
        return _reported(reports[process.pid]) if process.pid in reports else why_not_entered(process)


def _reported(report: str) -> str:
    kind, _, version = report.partition(" ")
    if kind == "ok":
        return ""
    if kind == "old":
        return f"its Python {version} is too old for flatout. Use Python 3.10 or newer"
    return f"flatout failed in it ({report}). Install flatout again: pip install --force-reinstall flatout"


def python_processes(root: int) -> tuple[list[PythonProcess], set[int]]:
    """The Python processes of a program, and the pids of those with a Python process below them."""
    import psutil  # here, because it takes 15 ms, and most programs need no look

    pythons: list[PythonProcess] = []
    parents: set[int] = set()
    try:
        root_process = psutil.Process(root)
        processes = [root_process, *root_process.children(recursive=True)]
    except psutil.Error:
        return [], set()
    parent_of = {process.pid: process.ppid() for process in processes if process.is_running()}
    for process in processes:
        try:
            argv = tuple(process.cmdline())
            if not argv or not is_python(process.exe() or argv[0]):
                continue
        except psutil.Error:
            continue
        try:
            environment: Mapping[str, str] | None = process.environ()
        except psutil.Error:
            environment = None
        pythons.append(PythonProcess(process.pid, argv, environment))
        pid = parent_of.get(process.pid, 0)
        while pid in parent_of:
            parents.add(pid)
            pid = parent_of[pid]
    return pythons, parents


def watch_from_beside(watch: EntryWatch, prefix: str) -> None:
    """Watch this process, which becomes the program, from a process beside it that is no child of it.

    It ends once flatout is in the program; otherwise it prints ``prefix`` and the cause."""
    program = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0:
            os.setsid()
            _watch(watch, program, prefix)
    finally:
        os._exit(0)


def _watch(watch: EntryWatch, program: int, prefix: str) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    watch.close_inherited_files()
    timer = select.poll()
    try:
        timer.register(os.pidfd_open(program), select.POLLIN)  # ends a wait when the program ends
    except (AttributeError, OSError):
        pass  # Linux before 5.3
    wait_s, cause = POLL_S, ""
    while not watch.is_decided(program):
        timer.poll(wait_s * 1000)
        if not owner(program):
            cause = watch.cause_at_end()
            break
        wait_s = min(SCAN_S, wait_s * 1.1)
    watch.close()
    if cause := cause or watch.cause:
        os.write(2, f"{prefix}{cause}\n".encode(errors="replace"))
