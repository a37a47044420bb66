"""Finds out whether a supervised program hangs, and says what its processes do.

A program hangs if none of its processes has shown a sign of life (`job/heartbeat.py`) for the limit. Ranks wait
for each other, so one rank that works clears the others. Each process is then asked for its Python stack.
"""

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from flatout.job.heartbeat import RemoteHeartbeat, Slot

POLL_S = 0.5
MIN_START_LIMIT_S = (
    1800.0  # the least limit before the first step (imports, compilation, the first batch) and at exit
)
STACK_TIMEOUT_S = 1.0  # for the stacks
INNER_FRAMES, MAX_FRAMES = 4, 60  # frames shown of a stack
STATES = {
    psutil.STATUS_RUNNING: "runs",
    psutil.STATUS_SLEEPING: "waits",
    psutil.STATUS_DISK_SLEEP: "waits in the kernel, where no signal reaches it",
    psutil.STATUS_STOPPED: "is stopped",
}
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+")
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen|/flatout/(?:agent|checkpoint|cli|distributed|loop)/"
)
COLLECTIVE = re.compile(
    r"/torch/distributed/|/distributed/(?:exchange|bucket_queue|wire|sharding)\.py|/autograd/graph\.py|/torch/cuda/"
)
WAITS_FOR_DATA = re.compile(r"/torch/utils/data/dataloader\.py")
FETCHING = re.compile(r"/torch/utils/data/_utils/fetch\.py|/flatout/data/")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        cwd = os.getcwd() + os.sep
        file = self.file.removeprefix(cwd).rpartition("-packages/")[2]
        return f"{file}, line {self.line}, in {self.function}"


@dataclass(frozen=True)
class Stack:
    """The stack of one thread, innermost frame first."""

    frames: tuple[Frame, ...] = ()

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the program's own code."""
        return next((frame for frame in self.frames if not LIBRARY.search(frame.file)), None)

    def visits(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(frame.file) for frame in self.frames)

    @property
    def shown(self) -> tuple[str, ...]:
        """The program's own frames and the innermost library frames, in the order of a traceback."""
        frames = [
            frame
            for depth, frame in enumerate(self.frames[:MAX_FRAMES])
            if depth < INNER_FRAMES or not LIBRARY.search(frame.file)
        ]
        return tuple(f"    {frame.text}" for frame in frames[::-1])

    @property
    def text(self) -> str:
        if not self.frames:
            return "its Python line is unknown, because it does not respond"
        inner, user_frame = self.frames[0], self.user_frame
        if user_frame is None or user_frame is inner:
            return inner.text
        return f"{user_frame.text} (from there in {inner.function} of {inner.text.partition(',')[0]})"


def stack_in(text: str) -> Stack:
    """The stack of the main thread in the output of faulthandler: the one that begins in a module, else the last."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if THREAD.match(line):
            threads.append([])
        elif threads and (match := FRAME.match(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    stacks = [Stack(tuple(frames)) for frames in threads if frames]
    main = [stack for stack in stacks if stack.frames[-1].function == "<module>"]
    return (main or stacks or [Stack()])[-1]


class ProgramProcess:
    """A process of the program that has a heartbeat page. Raises OSError, ValueError while it is being created."""

    def __init__(self, folder: str, name: str) -> None:
        self.page = RemoteHeartbeat(os.path.join(folder, name))
        self.pid = self.page.pid
        self._stack_file = Path(folder, f"stack.{self.pid}")
        self._stack_offset: int | None = None

    @property
    def status(self) -> str:
        """The state of the process as psutil names it; "" if it has ended."""
        try:
            status = str(psutil.Process(self.pid).status())
        except psutil.Error:
            return ""
        return "" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status

    @property
    def title(self) -> str:
        return f"process {self.pid}" + (f" (rank {self.page.rank})" if self.page.rank is not None else "")

    @property
    def progress(self) -> tuple[int, int, int]:
        """Its progress: ranks that wait for each other wait for the one with the least."""
        return self.page[Slot.STEPS], self.page[Slot.BACKWARDS], self.page[Slot.BATCHES]

    def request_stack(self) -> None:
        """Ask for its stack. A process without a handler gets no signal, which would kill it."""
        try:
            offset = self._stack_file.stat().st_size
            if self.page[Slot.STACK_SIGNAL] and self._handles(self.page[Slot.STACK_SIGNAL]):
                os.kill(self.pid, self.page[Slot.STACK_SIGNAL])
                self._stack_offset = offset
        except OSError:
            pass

    def _handles(self, number: int) -> bool:
        """Whether it handles this signal, and its descriptor is still the stack's file.

        Some scripts close descriptors that they did not open."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8", errors="replace")
        mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        handles = mask is not None and int(mask[1], 16) >> (number - 1) & 1
        return bool(handles) and os.path.samefile(
            f"/proc/{self.pid}/fd/{self.page[Slot.STACK_DESCRIPTOR]}", self._stack_file
        )

    @property
    def stack(self) -> Stack:
        if self._stack_offset is None:
            return Stack()
        try:
            with self._stack_file.open("rb") as file:
                file.seek(self._stack_offset)
                return stack_in(file.read(1 << 18).decode(errors="replace"))
        except OSError:
            return Stack()


@dataclass(frozen=True)
class ProcessEvent:
    """An event of a process.

    ``kind`` is "stopped" (it was continued) or "hung". ``message`` is one sentence; ``lines`` are printed below
    it."""

    kind: str
    message: str
    step: int
    place: str = ""
    lines: tuple[str, ...] = ()


class ProgramProcesses:
    """The processes of one start of the program, whose heartbeat pages are in ``folder``."""

    def __init__(self, folder: str, now: float, hang_after_s: float) -> None:
        self.folder, self.hang_after_s = folder, hang_after_s
        self.known: dict[int, ProgramProcess] = {}
        self._progress_s = self._polled_s = now
        self._progress_count = 0
        self._requested_s: float | None = None  # when the stacks were asked for

    @property
    def steps(self) -> int:
        return max((process.page[Slot.STEPS] for process in self.known.values()), default=0)

    @property
    def has_resumed(self) -> bool:
        return any(process.page[Slot.CHECKPOINTS_READ] for process in self.known.values())

    @property
    def checkpoint_count(self) -> int:
        """The number of checkpoints written after a step; some scripts save at the start."""
        pages = (process.page for process in self.known.values())
        after_step = (page for page in pages if page[Slot.STEPS_AT_CHECKPOINT] or page[Slot.CHECKPOINT_STEP])
        return sum(page[Slot.CHECKPOINTS] for page in after_step)

    def newest_checkpoint(self, base: int) -> int:
        """The step of the newest checkpoint of a program that resumed from ``base``; 0 without one."""
        steps = []
        for page in (process.page for process in self.known.values()):
            if page[Slot.CHECKPOINTS] and page[Slot.CHECKPOINT_STEP]:
                steps.append(page[Slot.CHECKPOINT_STEP] - 1)
            elif page[Slot.CHECKPOINTS] and page[Slot.STEPS_AT_CHECKPOINT]:
                steps.append(base + page[Slot.STEPS_AT_CHECKPOINT])
        return max(steps, default=0)

    def max_of(self, field: int) -> int:
        return max((process.page[field] for process in self.known.values()), default=0)

    def skip_pause(self, now: float) -> None:
        """Record that everything was stopped for a while on purpose."""
        self._progress_s += now - self._polled_s
        self._polled_s = now

    def poll(self, now: float) -> ProcessEvent | None:
        """Poll the processes, and return the event to handle. Call it every POLL_S."""
        if now - self._polled_s > 8 * POLL_S:  # the supervisor was stopped, or the machine slept
            self.skip_pause(now)
        self._polled_s = now
        self._find()
        count = sum(process.page.activity for process in self.known.values())
        if count != self._progress_count:
            self._progress_count, self._progress_s, self._requested_s = count, now, None
        is_training = self.steps and not self.max_of(Slot.EXITING)
        limit_s = self.hang_after_s if is_training else max(self.hang_after_s, MIN_START_LIMIT_S)
        if now - self._progress_s < limit_s or not self.known:
            return None
        alive = [process for process in self.known.values() if process.status]
        if any(process.status == psutil.STATUS_TRACING_STOP for process in alive):
            self._progress_s = now  # a debugger holds it
            return None
        stopped = [process for process in alive if process.status == psutil.STATUS_STOPPED]
        if stopped:
            return self._continue(stopped, now)
        if self._requested_s is None:
            self._requested_s = now
            for process in alive:
                process.request_stack()
            return None
        return self._hang_event(alive, now) if alive and now - self._requested_s >= STACK_TIMEOUT_S else None

    def _find(self) -> None:
        for name in os.listdir(self.folder):
            kind, _, number = name.partition(".")
            if kind == "heartbeat" and number.isdigit() and int(number) not in self.known:
                try:
                    self.known[int(number)] = ProgramProcess(self.folder, name)
                except (OSError, ValueError):
                    continue  # it is being created

    def _continue(self, stopped: Sequence[ProgramProcess], now: float) -> ProcessEvent:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
        silent_s, self._progress_s, first = now - self._progress_s, now, stopped[0]
        parents = [other for other in self.known.values() if first.pid in _children(other.pid)]
        is_worker = parents and not first.page[Slot.STEPS]  # a rank is a child of torchrun
        title = f"loader worker (process {first.pid}) of {parents[0].title}" if is_worker else first.title
        return ProcessEvent(
            "stopped", f"{title} was stopped (SIGSTOP) for {silent_s:.0f} s; it was continued", self.steps
        )

    def _hang_event(self, alive: Sequence[ProgramProcess], now: float) -> ProcessEvent:
        silent_s = now - self._progress_s
        group = [process for process in alive if process.page[Slot.STEPS]] or list(alive)
        stacks = {process.pid: process.stack for process in alive}
        behind = _furthest_behind(group, stacks)
        process = hung = behind[0]
        titles = " and ".join(rank.title for rank in behind[:4])
        waiting_count = len(group) - len(behind)
        subject = f"{titles} {'have' if len(behind) > 1 else 'has'} " + (
            "finished no step" if process.page[Slot.STEPS] else "not reached a first step"
        )
        if stacks[process.pid].visits(WAITS_FOR_DATA):
            children = _children(process.pid)
            for worker in alive:
                stack = stacks[worker.pid]
                if worker.pid in children and (not stack.frames or stack.visits(FETCHING)):
                    hung = worker
                    subject = f"loader worker (process {hung.pid}) of {process.title} has returned no batch"
                    break
        waits = f"; {waiting_count} other{'s wait' if waiting_count > 1 else ' waits'} for it"
        waits = waits if waiting_count else ""
        stack = stacks[hung.pid]
        lines = stack.shown
        if not stack.frames and (names := _children(hung.pid)):
            lines = (f"    its children: {', '.join(f'{name} ({pid})' for pid, name in names.items())}",)
        message = (
            f"{subject} for {silent_s:.0f} s (after step {process.page[Slot.STEPS]}){waits}. "
            f"{'It' if hung is process else 'The worker'} {STATES.get(hung.status, hung.status or 'is gone')}: {stack.text}"
        )
        place = stack.user_frame.text if stack.user_frame is not None else stack.text
        return ProcessEvent("hung", message, process.page[Slot.STEPS], place, lines)


def _furthest_behind(group: Sequence[ProgramProcess], stacks: dict[int, Stack]) -> list[ProgramProcess]:
    """The processes that the others wait for: those furthest behind, else those not in a collective."""
    smallest = min(process.progress for process in group)
    behind = [process for process in group if process.progress == smallest]
    if len(behind) < len(group):
        return behind
    outside = [process for process in group if not stacks[process.pid].visits(COLLECTIVE)]
    return outside or list(group)


def _children(pid: int) -> dict[int, str]:
    try:
        return {child.pid: child.name() for child in psutil.Process(pid).children()}
    except psutil.Error:
        return {}
