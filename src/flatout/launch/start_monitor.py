"""Monitors one start of a supervised program: heartbeats, hangs, restarts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.job import heartbeat
from flatout.launch.event_fifo import EventFifo
from flatout.launch.launcher_signals import ASKING_TO_END, LauncherSignals, ReceivedSignal
from flatout.launch.monitored_processes import ProgramProcesses
from flatout.launch.process_table import ProcessEvent
from flatout.launch.rank import Rank
from flatout.launch.rank_monitor import RankMonitor
from flatout.launch.reaper import end_members
from flatout.launch.restart_policy import (
    Attempt,
)
from flatout.launch.stall_limits import LOOK_S

if TYPE_CHECKING:
    from flatout.launch.supervisor import SupervisionLimits, SupervisorClocks

MARKED = heartbeat.FOLDER
STARTS_S = 0.1  # between two polls during start-up: restart times are reported to 0.1 s


class StartMonitor(RankMonitor):
    """One start of the program.

    ``hung`` is the hang that ended it, if any. ``late``: it did not exit in time after a request to."""

    def __init__(
        self,
        rank: Rank,
        folder: Path,
        event_fifo: EventFifo,
        signals: LauncherSignals,
        shares_group: bool,
        watched: ProgramProcesses,
        attempt: Attempt,
        terms: SupervisionLimits,
        clocks: SupervisorClocks,
        observes: Callable[[ProcessEvent], None],
        steps: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__([rank], folder, event_fifo, signals, shares_group, say)
        self.every_s = STARTS_S
        self.watched, self.attempt, self.terms, self.clocks = watched, attempt, terms, clocks
        self.observes, self.steps = observes, steps
        self.hung: ProcessEvent | None = None
        self.late = False
        self._next = 0.0

    def looked(self) -> None:
        now = self.clocks.seconds()
        if now < self._next:
            return
        self.every_s = LOOK_S if self.attempt.stepped is not None else STARTS_S
        self._next = now + self.every_s / 2  # other events do not increase the polling rate
        events = self.watched.look(now)
        self.note(now)
        for event in events:
            if event.kind == "stopped":
                self.observes(event)
            elif self.hung is None and self.asked is None:
                self.hung = event
                self.observes(event)
                self._kill()

    def note(self, now: float) -> None:
        """Record the progress of this start."""
        attempt, watched = self.attempt, self.watched
        if attempt.imported is None and watched.imported:
            attempt.imported = now
        if attempt.stepped is None and watched.steps:
            attempt.stepped = now
            self.steps()
        attempt.steps = watched.steps
        if watched.saves > attempt.saves:
            attempt.saves, attempt.saved = watched.saves, now

    def asked_by(self, code: int) -> int | None:
        """Return the signal by which the user requested the exit.

        A signal that requests nothing by itself (SIGUSR1) counts if the program exits with its number."""
        return self.asked if self.asked is not None else code - 128 if code - 128 in self._passed else None

    def _observed(self, observed: ReceivedSignal) -> None:
        if observed.number in ASKING_TO_END and self.asked is not None and not self._may_insist:
            return  # a repetition of the same key press
        first = self.asked is None
        super()._observed(observed)
        if observed.number == signal.SIGTSTP:
            self.watched.held(self.clocks.seconds())
        if first and self.asked is not None and self._living():
            self.event_fifo.after(self.terms.grace_s, "grace")

    def _timed(self, word: str) -> None:
        if word == "grace" and self._living():
            self.late = True
            self._kill()
        else:
            super()._timed(word)

    def _kill(self) -> None:
        """Kill the program and all processes that it started."""
        super()._kill()
        end_members(str(self.folder), MARKED)
