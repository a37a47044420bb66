"""Inspect a process from outside: its state from /proc, and its Python stack if it has a handler."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from flatout.job.heartbeat import SIGNAL, STACK, RemoteHeartbeat

IS_STOPPED = "T"
INNERMOST, MOST_FRAMES = 4, 60  # frames shown of a stack
STATES = {
    "R": "runs",
    "S": "waits",
    "D": "waits in the kernel, where no signal reaches it",
    "T": "is stopped",
    "t": "is held by a debugger",
    "Z": "has ended",
}
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+")
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen|/flatout/(?:agent|checkpoint|cli|distributed|loop)/"
)
COMPILES = re.compile(
    r"/torch/(?:_dynamo|_inductor|_export|fx|_functorch)/|/triton/|/torch/utils/cpp_extension\.py"
)
IMPORTS = re.compile(r"^<frozen importlib")
MEETS_RANKS = re.compile(
    r"/torch/distributed/|/distributed/(?:exchange|transport|sharding)\.py|/autograd/graph\.py|/torch/cuda/"
)
FETCHES = re.compile(r"/torch/utils/data/_utils/fetch\.py|/flatout/data/")


@dataclass(frozen=True)
class State:
    """The state of a process.

    ``letter`` is the state as in ps; ``ticks`` is the CPU time used, in units of SC_CLK_TCK per second;
    ``wchan`` is the kernel function in which it waits, "" if hidden."""

    letter: str
    parent: int
    ticks: int
    wchan: str

    @property
    def words(self) -> str:
        return STATES.get(self.letter, f"is in state {self.letter}") + (
            f" (in the kernel: {self.wchan})" if self.wchan and self.letter in "SD" else ""
        )


def state_of(pid: int) -> State | None:
    """Return the state of a process; None if it has exited."""
    try:
        info = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    try:
        wchan = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip("0\n ")
    except (OSError, ValueError):
        wchan = ""
    return State(info[0], int(info[1]), int(info[11]) + int(info[12]), wchan)


def children_of(pid: int) -> list[str]:
    """Return the running children of a process as ``name (number)``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                info = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            title, _, rest = info.partition("(")[2].rpartition(")")
            if rest.split()[1] == str(pid) and rest.split()[0] not in "ZX":
                found.append(f"{title} ({name})")
    return found


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def of_a_library(self) -> bool:
        return LIBRARY.search(self.file) is not None

    @property
    def words(self) -> str:
        return f"{_short(self.file)}, line {self.line}, in {self.function}"


@dataclass(frozen=True)
class Stack:
    """The stack of one thread, innermost frame first."""

    frames: tuple[Frame, ...]

    @property
    def own_line(self) -> Frame | None:
        """The innermost frame of the program's own code."""
        return next((frame for frame in self.frames if not frame.of_a_library), None)

    @property
    def place(self) -> tuple[tuple[str, str], ...]:
        """The functions of the stack, without lines: a loop changes its line but not its function."""
        return tuple((frame.file, frame.function) for frame in self.frames)

    def passes(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(frame.file) for frame in self.frames)

    @property
    def shown(self) -> list[Frame]:
        """The program's own frames and the innermost library frames, in the order of a traceback."""
        return [
            frame
            for at, frame in enumerate(self.frames[:MOST_FRAMES])
            if at < INNERMOST or not frame.of_a_library
        ][::-1]

    @property
    def words(self) -> str:
        own = self.own_line
        if own is None:
            return self.frames[0].words if self.frames else "no Python code"
        inner = self.frames[0]
        return own.words + (
            "" if inner is own else f" (from there in {inner.function} of {_short(inner.file)})"
        )


def _short(path: str) -> str:
    here = os.getcwd() + os.sep
    for cut in ("/site-packages/", "/dist-packages/"):
        if cut in path:
            return path.rpartition(cut)[2]
    return path.removeprefix(here)


def stacks_in(text: str) -> list[Stack]:
    """Return the stacks in the last output of faulthandler, the main thread first.

    The main thread is the one that begins in a module, else the last one."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if THREAD.match(line):
            threads.append([])
        elif threads and (found := FRAME.match(line)):
            threads[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
    stacks = [Stack(tuple(frames)) for frames in threads if frames]
    begins = [stack for stack in stacks if stack.frames[-1].function == "<module>"]
    return [*begins[-1:], *(stack for stack in stacks if stack not in begins[-1:])]


class StackRequest:
    """A request for the stack of a process; ``answer`` returns the stack once it has been written.

    Sends no signal to a process without a handler, because that would kill it."""

    def __init__(self, folder: str, pid: int, page: RemoteHeartbeat | None) -> None:
        self.path = Path(folder, f"stack.{pid}")
        self.sent = False
        try:
            self._before = self.path.stat().st_size
            if page is not None and page[SIGNAL] and _expects(pid, page[SIGNAL], page[STACK], self.path):
                os.kill(pid, page[SIGNAL])
                self.sent = True
        except OSError:
            pass

    def answer(self) -> Stack | None:
        """Return the main thread's stack; None if there is none (yet)."""
        if not self.sent:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(self._before)
                found = stacks_in(file.read(1 << 18).decode(errors="replace"))
        except OSError:
            return None
        return found[0] if found else None


def _expects(pid: int, number: int, descriptor: int, path: Path) -> bool:
    """Return whether the process handles this signal, and its descriptor is still the stack's file.

    Some scripts close descriptors that they did not open."""
    caught = next(
        (
            line
            for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("SigCgt:")
        ),
        "",
    )
    handles = bool(int(caught.split()[1], 16) >> (number - 1) & 1) if caught else False
    return handles and os.path.realpath(f"/proc/{pid}/fd/{descriptor}") == os.path.realpath(path)
