"""The processes of a program: ranks, loader workers, and the steps that they report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatout.job.heartbeat import (
    BACKWARDS,
    BATCHES,
    IMPORTED,
    PHASE,
    SAVED,
    SAVED_AT,
    SAVES,
    STEPS,
    WENT_ON,
    RemoteHeartbeat,
)
from flatout.launch.process_stacks import (
    COMPILES,
    FETCHES,
    IMPORTS,
    Stack,
    StackRequest,
    State,
    children_of,
    state_of,
)
from flatout.launch.stall_limits import (
    AT_WORK,
    COMPILING,
    FLOORS_S,
    IN_WORDS,
    LOOK_S,
    READING_CODE,
    WAITS_FOR_DEBUGGER,
    StallTimer,
)

ASK_AT = (0.5, 0.7, 0.85)  # of the limit
WORKS = 0.5  # of a core: the process computes


class ProcessTable:
    """Finds the processes of a program by their heartbeats."""

    def __init__(self, folder: str, now: float, floor_s: float | None = None) -> None:
        self.folder, self.floor_s = folder, floor_s
        self.all: dict[int, MonitoredProcess] = {}
        self._rounds = 0
        self._looked = now
        self._gone: set[int] = set()

    @property
    def living(self) -> list[MonitoredProcess]:
        return [process for pid, process in self.all.items() if pid not in self._gone]

    @property
    def steps(self) -> int:
        return max((process.page[STEPS] for process in self.all.values()), default=0)

    @property
    def imported(self) -> bool:
        return any(process.page[PHASE] >= IMPORTED for process in self.all.values())

    @property
    def went_on(self) -> bool:
        return any(process.page[WENT_ON] for process in self.all.values())

    @property
    def saves(self) -> int:
        """The number of checkpoints written after a step; some scripts save at the start."""
        return sum(
            process.page[SAVES]
            for process in self.all.values()
            if process.page[SAVED_AT] or process.page[SAVED]
        )

    def kept(self, base: int) -> int:
        """Return the step of the newest checkpoint of a program that resumed from ``base``; 0 without one."""
        found = [process.page for process in self.all.values() if process.page[SAVES]]
        return max(
            (
                page[SAVED] - 1 if page[SAVED] else base + page[SAVED_AT]
                for page in found
                if page[SAVED] or page[SAVED_AT]
            ),
            default=0,
        )

    def word(self, place: int) -> int:
        return max((process.page[place] for process in self.all.values()), default=0)

    def _pass_over(self, now: float, seconds: float) -> None:
        for process in self.all.values():
            process.silence.pass_over(seconds)
            process.stopped_at = None

    def _find(self, now: float) -> None:
        for name in os.listdir(self.folder):
            kind, _, number = name.partition(".")
            if kind == "heartbeat" and number.isdigit() and int(number) not in self.all:
                try:
                    self.all[int(number)] = MonitoredProcess(
                        RemoteHeartbeat(os.path.join(self.folder, name)), StallTimer(now, self.floor_s)
                    )
                except (OSError, ValueError):
                    continue  # it is being created

    def _limit_s(self, process: MonitoredProcess) -> float:
        return (
            process.silence.limit_s
            if process.page[STEPS]
            else max(process.silence.limit_s, FLOORS_S[IMPORTED])
        )

    def _ask(self, processes: Sequence[MonitoredProcess], now: float) -> None:
        """Inspect the processes.

        Stacks are requested only before the verdict, or if the process computes: the signal may interrupt a
        call that waits in C (sleep(3))."""
        for process in processes:
            state = state_of(process.pid)
            wants = self._rounds == len(ASK_AT) or (
                bool(process.looks) and _used_s(process.looks[-1].state, state) > 0
            )
            process.looks.append(
                ProcessInspection(
                    now, StackRequest(self.folder, process.pid, process.page) if wants else None, state
                )
            )
            del process.looks[: -len(ASK_AT)]

    def _answers(self, now: float) -> None:
        for process in self.living:
            for look in process.looks:
                if look.stack is None and look.asked is not None and now > look.at:
                    look.stack = look.asked.answer()

    def _label(self, process: MonitoredProcess, now: float) -> None:
        """Set the activity of a process from its newest inspection, beyond what it reports itself."""
        if not process.looks:
            return
        last, silence = process.looks[-1], process.silence
        if last.asked is None or (last.stack is None and now - last.at < 2 * LOOK_S):
            return  # the stack was not requested or has not arrived yet
        doing: str | None
        if last.state is not None and last.state.letter == "t":
            doing = WAITS_FOR_DEBUGGER
        elif last.stack is not None and last.stack.passes(COMPILES):
            doing = COMPILING
        elif last.stack is not None and last.stack.passes(IMPORTS):
            doing = READING_CODE
        else:
            doing = AT_WORK if silence.doing == AT_WORK and works_elsewhere(process) else None
        if doing is None and silence.doing is not None:  # the limit restarts at the last inspection
            silence.since, self._rounds = last.at, 0
        silence.doing = doing

    def _event(
        self, process: MonitoredProcess, looked_at: MonitoredProcess, what: str, now: float, waiting: str = ""
    ) -> ProcessEvent:
        state = looked_at.looks[-1].state if looked_at.looks else state_of(looked_at.pid)
        stack = looked_at.stack
        silent_s, step = process.silence.lasts_s(now), process.page[STEPS]
        doing = IN_WORDS.get(process.silence.kind, "")
        does = state.words if state is not None else "is gone"
        place = (
            stack.words if stack is not None else "its Python line is unknown, because it does not respond"
        )
        lines = [f"    {frame.words}" for frame in stack.shown] if stack is not None else []
        children = children_of(looked_at.pid) if stack is None else []
        if children:
            lines.append(f"    its children: {', '.join(children[:8])}")
        said = (
            f"{what} for {silent_s:.0f} s (after step {step}, {doing}; its limit is {process.silence.limit_s:.0f} s){waiting}. "
            f"{'The worker' if looked_at is not process else 'It'} {does}: {place}"
        )
        own = stack.own_line if stack is not None else None
        return ProcessEvent(
            "hung",
            said,
            looked_at.pid,
            process.page.rank,
            step,
            silent_s,
            own.words if own is not None else place,
            tuple(lines),
        )

    def _workers_of(self, process: MonitoredProcess) -> dict[int, MonitoredProcess]:
        """Return its running loader workers that can be asked for a stack.

        Of several loaders, the one started last counts."""
        try:
            lines = Path(self.folder, f"workers.{process.pid}").read_text(encoding="ascii").splitlines()
        except OSError:
            return {}
        living = {each.pid: each for each in self.living}
        found = {}
        for number, pid in (map(int, line.split()) for line in lines if line.count(" ") == 1):
            if pid in living:
                found[pid] = number
        return {pid: living[pid] for pid in found}

    def _owner_of(self, pid: int) -> tuple[MonitoredProcess | None, int]:
        for process in self.living:
            number = self._number_of(process, pid)
            if number is not None:
                return process, number
        return None, 0

    def _number_of(self, process: MonitoredProcess, pid: int) -> int | None:
        try:
            lines = Path(self.folder, f"workers.{process.pid}").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next((int(line.split()[0]) for line in reversed(lines) if line.endswith(f" {pid}")), None)

    def _guilty_workers(self, process: MonitoredProcess) -> list[tuple[int, MonitoredProcess]]:
        """Return the workers that are fetching, or whose stack is unknown."""
        found = []
        for pid, worker in self._workers_of(process).items():
            state = state_of(pid)
            if state is not None and (
                worker.stack is None or worker.stack.passes(FETCHES) or state.letter in "TD"
            ):
                found.append((self._number_of(process, pid) or 0, worker))
        return sorted(found, key=lambda each: each[0])


@dataclass
class ProcessInspection:
    """One inspection of a process."""

    at: float
    asked: StackRequest | None
    state: State | None
    stack: Stack | None = None


@dataclass
class MonitoredProcess:
    page: RemoteHeartbeat
    silence: StallTimer
    looks: list[ProcessInspection] = field(default_factory=list)
    stopped_at: float | None = None

    @property
    def pid(self) -> int:
        return self.page.pid

    @property
    def title(self) -> str:
        return f"process {self.pid}" + (f" (rank {self.page.rank})" if self.page.rank is not None else "")

    @property
    def stack(self) -> Stack | None:
        return next((look.stack for look in reversed(self.looks) if look.stack is not None), None)

    @property
    def done(self) -> tuple[int, int, int]:
        """Its progress: ranks that wait for each other wait for the one with the least."""
        return self.page[STEPS], self.page[BACKWARDS], self.page[BATCHES]


@dataclass(frozen=True)
class ProcessEvent:
    """An event of a process.

    ``kind`` is "stopped" (it was continued) or "hung". ``said`` is one sentence; ``lines`` are printed below
    it."""

    kind: str
    said: str
    pid: int
    rank: int | None
    step: int
    silent_s: float
    place: str = ""
    lines: tuple[str, ...] = ()


def works_elsewhere(process: MonitoredProcess) -> bool:
    """Return whether the process computes and changes its function between inspections.

    An endless loop stays in its function."""
    looks = [look for look in process.looks if look.stack is not None and look.state is not None]
    if len(looks) < 2:
        return False
    before, last = looks[-2], looks[-1]
    return _used_s(before.state, last.state) >= WORKS * (last.at - before.at) and _place(before) != _place(
        last
    )


def _used_s(before: State | None, now: State | None) -> float:
    """Return the CPU time between two inspections."""
    return (
        (now.ticks - before.ticks) / os.sysconf("SC_CLK_TCK")
        if before is not None and now is not None
        else 0.0
    )


def _place(look: ProcessInspection) -> tuple[tuple[str, str], ...]:
    return look.stack.place if look.stack is not None else ()
