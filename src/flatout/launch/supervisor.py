"""Supervise one program: start it, forward signals, detect hangs and crashes, restart it while it progresses.

The program has our input, output, terminal and process group; signals reach it as they would without us.
FLATOUT_HEARTBEAT identifies the processes that it starts, which end with it. The caller passes the clocks. Linux
only.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flatout.job import heartbeat
from flatout.job.temporary import remove, temporary
from flatout.launch.event_fifo import EventFifo
from flatout.launch.failure import exit_code
from flatout.launch.incidents import IncidentLog
from flatout.launch.launcher_signals import LauncherSignals, in_foreground
from flatout.launch.monitored_processes import ProgramProcesses
from flatout.launch.process_table import ProcessEvent
from flatout.launch.rank import Rank
from flatout.launch.reaper import Reaper, end_members
from flatout.launch.restart_policy import (
    Attempt,
    Ending,
    Incident,
    RestartHistory,
    ending_of,
    failures_in,
    kills_for_memory,
)
from flatout.launch.start_monitor import MARKED, StartMonitor
from flatout.schema.errors import NotFinite, ProgramHung, UsageError

MOST_TYPED = 80  # characters of a command in a message


@dataclass(frozen=True)
class SupervisionLimits:
    """Limits of the supervision.

    ``restarts`` is the maximum number of restarts. ``grace_s`` is the time for a last checkpoint after a
    request to exit. ``hang_after_s`` replaces the default of 10 s for the shortest stall that counts as a
    hang."""

    restarts: int
    grace_s: float
    hang_after_s: float | None = None


@dataclass(frozen=True)
class SupervisorClocks:
    """A monotonic clock in seconds, and the current date and time as text."""

    seconds: Callable[[], float]
    today: Callable[[], str]


class Supervisor:
    """Supervises the program ``argv`` with ``environment``.

    After ``run``, ``ended_by`` is the signal by which the user ended it, or None."""

    def __init__(
        self,
        title: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        terms: SupervisionLimits,
        clocks: SupervisorClocks,
        book: IncidentLog,
        say: Callable[[str], None],
    ) -> None:
        if not hasattr(select, "epoll") or not hasattr(os, "posix_fallocate"):
            raise UsageError(f"--supervise needs Linux, and this is {sys.platform}. Remove --supervise.")
        self.argv, self.environment, self.terms, self.clocks, self.book, self.say = (
            list(argv),
            dict(environment),
            terms,
            clocks,
            book,
            say,
        )
        self.title = f"`{title if len(title) <= MOST_TYPED else title[:MOST_TYPED] + '...'}`"
        self.course = RestartHistory()
        self.ended_by: int | None = None
        self._open: Incident | None = None  # until the restart reaches a step

    def run(self) -> int:
        """Run until the program has ended for good, and return its exit code. Call it from the main thread.

        Raises ProgramNotFound, StorageError."""
        self.folder = temporary("watched", in_memory=True)
        (self.folder / "begun").touch()
        event_fifo = EventFifo(self.folder)
        with LauncherSignals() as signals:
            reaper = Reaper(str(self.folder), MARKED)
            try:
                return self._run(signals, event_fifo)
            finally:
                event_fifo.close()
                reaper.dismiss()
                remove(self.folder)

    def _run(self, signals: LauncherSignals, event_fifo: EventFifo) -> int:
        while True:
            attempt, ending = self._attempt(signals, event_fifo)
            why = self._why_not_again(attempt, ending)
            if why is None:
                continue
            self._close("the end")
            if why:
                self.say(f"not restarted: {why}.")
            self._sum_up(well=ending.kind == "well")
            return ending.code

    # -- one start -------------------------------------------------------------------------------------------

    def _attempt(self, signals: LauncherSignals, event_fifo: EventFifo) -> tuple[Attempt, Ending]:
        self._tidy()
        event_fifo.hush()  # discard timers and events of the last start
        attempt = Attempt(len(self.course.attempts) + 1, self.clocks.seconds(), base=self.course.kept)
        self.course.attempts.append(attempt)
        environment = {
            **self.environment,
            MARKED: str(self.folder),
            "FLATOUT_CRASH_REPORTS": str(self.folder / f"reported{attempt.number}"),
            "FLATOUT_FIRST": "",
        }
        shares_group = in_foreground()
        kills = kills_for_memory()
        rank = Rank(0, self.argv, environment, not shares_group, signals.give_back)
        watched = ProgramProcesses(str(self.folder), attempt.began, self.terms.hang_after_s)
        guard = StartMonitor(
            rank,
            self.folder,
            event_fifo,
            signals,
            shares_group,
            watched,
            attempt,
            self.terms,
            self.clocks,
            lambda event: self._observes(event, attempt, watched),
            lambda: self._came_to_a_step(attempt),
            lambda said: self.say(said),
        )
        ended = False
        try:
            guard.until_the_end()
            ended = True
        finally:
            if not ended:
                end_members(str(self.folder), MARKED)
            rank.close()
        now = self.clocks.seconds()
        watched.look(now)
        guard.note(now)
        attempt.base = self.course.kept if watched.went_on or not attempt.steps else 0
        attempt.kept = watched.kept(attempt.base)
        code = -signal.SIGKILL if rank.process.returncode is None else rank.process.returncode
        ending = self._ending(guard, code, watched, kills)
        if ending.kind != "well":  # processes that a successful program leaves running may continue
            end_members(str(self.folder), MARKED)
        attempt.ended = self.clocks.seconds()
        if ending.kind not in ("well", "asked"):
            self._failed(attempt, ending, guard, now)
        return attempt, ending

    def _tidy(self) -> None:
        for kind in ("heartbeat", "stack", "workers", "failed"):
            for path in self.folder.glob(f"{kind}.*"):
                path.unlink(missing_ok=True)

    def _ending(self, guard: StartMonitor, code: int, watched: ProgramProcesses, kills: int | None) -> Ending:
        asked = guard.asked_by(code)
        if asked is not None:
            if guard.late:
                self.say(
                    f"{self.title} did not exit within {self.terms.grace_s:g} s of {signal.Signals(asked).name} and was killed. Increase --grace."
                )
            killed = guard.ranks[0].killed
            self.ended_by = asked if killed or code == -asked else None
            return Ending(
                "asked", 128 + asked if killed else exit_code(code), f"ended by {signal.Signals(asked).name}"
            )
        if guard.hung is not None:
            return Ending("hung", ProgramHung.exit_code, guard.hung.said, guard.hung.place)
        step = watched.word(heartbeat.NOT_FINITE)
        if step:
            return Ending(
                "nan",
                NotFinite.exit_code,
                f"the loss of step {step} was NaN or infinite, so --on-nan stop ended the program",
                advice="an earlier checkpoint has finite weights; a lower learning rate or gradient clipping may help",
            )
        if code == 0:
            return Ending("well", 0, "")
        after = kills_for_memory()
        by_kernel = None if kills is None or after is None else after > kills
        return ending_of(code, self.title, failures_in(str(self.folder)), by_kernel, watched.steps)

    # -- what is said and written ----------------------------------------------------------------------------

    def _observes(self, event: ProcessEvent, attempt: Attempt, watched: ProgramProcesses) -> None:
        """Report an event when it is detected, before a hung program is ended."""
        if event.kind == "hung":
            again = self.course.again("hung", event.place)
            self.say(f"{event.said}{'; the same as before' if again else ''}.")
            for line in event.lines if not again else ():
                self.say(line)
            return
        self.say(f"{event.said}.")
        self.book.write(
            Incident(
                self.clocks.today(),
                attempt.number,
                event.kind,
                event.said,
                event.place,
                event.pid,
                event.rank,
                event.step,
                watched.kept(attempt.base),
                None,
                event.silent_s,
                followed_by="continued",
            )
        )

    def _failed(self, attempt: Attempt, ending: Ending, guard: StartMonitor, found: float) -> None:
        self._close("the next failure")
        hung, assert_ended = guard.hung, attempt.ended or found
        if hung is None:
            again = self.course.again(ending.kind, ending.place)
            where = f", at {ending.place}" if ending.place else ""
            self.say(f"{ending.what}{where}{'; the same as before' if again else ''}.")
        self.course.note(attempt)
        pid, rank = (hung.pid, hung.rank) if hung is not None else (guard.ranks[0].process.pid, None)
        self._open = Incident(
            self.clocks.today(),
            attempt.number,
            ending.kind,
            ending.what,
            ending.place,
            pid,
            rank,
            attempt.reached,
            attempt.kept,
            ending.code,
            hung.silent_s if hung is not None else 0.0,
            assert_ended - found,
            lines=hung.lines if hung is not None else (),
        )

    def _why_not_again(self, attempt: Attempt, ending: Ending) -> str | None:
        """Return why the program is not restarted; None if it is."""
        if ending.kind in ("well", "asked"):
            return ""
        if ending.kind == "nan":
            return ending.advice
        why = self.course.why_not_again(ending, attempt, self.terms.restarts)
        if why:
            return why
        kept = (
            f"its newest checkpoint is of step {attempt.kept}"
            if attempt.kept
            else f"its newest checkpoint is of step {self.course.kept}"
            if self.course.kept
            else "no checkpoint is known, so the program decides where to start"
        )
        self.say(f"restarted ({attempt.number} of at most {self.terms.restarts}): {kept}.")
        return None

    def _came_to_a_step(self, attempt: Attempt) -> None:
        if self._open is not None and attempt.stepped is not None:
            imported = attempt.imported if attempt.imported is not None else attempt.stepped
            self._open.start_s, self._open.load_s = imported - attempt.began, attempt.stepped - imported
            self._close("restart")

    def _close(self, followed_by: str) -> None:
        if self._open is not None:
            self._open.followed_by, incident = followed_by, self._open
            self._open = None
            self.book.write(incident)

    def _sum_up(self, well: bool) -> None:
        """Print one summary line, if there were steps."""
        attempts = self.course.attempts
        reached = max(each.reached for each in attempts)
        if not reached:
            return
        now = attempts[-1].ended or self.clocks.seconds()
        restarts = len(attempts) - 1
        word = "no restart" if not restarts else "1 restart" if restarts == 1 else f"{restarts} restarts"
        where = f"; the incidents are in {self.book.path}" if self.book.written else ""
        steps = f"{reached:,} step{'s' if reached > 1 else ''} in {now - attempts[0].began:.0f} s"
        self.say(
            f"{steps}, {word}; {self.course.goodput(now, well):.0%} of the time went into steps that were kept{where}."
        )
