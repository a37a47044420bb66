"""Supervise one program: start it, forward signals, detect hangs and crashes, restart it while it progresses.

The program has our input, output, terminal and process group; signals reach it as they would without us.
FLATOUT_HEARTBEAT identifies the processes that it starts, which end with it. Linux only. `flatout run` replaces
itself with this process, so that the job keeps its process ID.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatout.job import heartbeat
from flatout.job.folder import read_json
from flatout.job.sanitize import sanitize
from flatout.job.streams import open_closed_streams
from flatout.job.temporary import remove, temporary
from flatout.launch.event_fifo import EventFifo
from flatout.launch.failure import exit_code
from flatout.launch.hang import LOOK_S, ProcessEvent, ProgramProcesses
from flatout.launch.launcher_signals import (
    ASKING_TO_END,
    LauncherSignals,
    ReceivedSignal,
    exit_by_signal,
    in_foreground,
)
from flatout.launch.rank import Rank
from flatout.launch.rank_monitor import RankMonitor
from flatout.launch.reaper import Reaper, end_members
from flatout.launch.restart_policy import (
    Attempt,
    Ending,
    Incident,
    RestartHistory,
    ending_of,
    failures_in,
    oom_kills,
)
from flatout.measure.clock import seconds, today
from flatout.schema.errors import FlatoutError, NotFinite, ProgramHung, UsageError

MARKED = heartbeat.FOLDER
MOST_TYPED = 80  # characters of a command in a message


class StartMonitor(RankMonitor):
    """Monitors one start of the program.

    ``event`` is the hang that ended it, if any. ``late``: it did not exit in time after a request to."""

    def __init__(self, supervisor: Supervisor, rank: Rank, attempt: Attempt, shares_group: bool) -> None:
        super().__init__(
            [rank], supervisor.folder, supervisor.event_fifo, supervisor.signals, shares_group, supervisor.say
        )
        self.every_s = LOOK_S
        self.supervisor, self.attempt = supervisor, attempt
        self.processes = ProgramProcesses(str(self.folder), seconds(), supervisor.hang_after_s)
        self.hung: ProcessEvent | None = None
        self.late = False
        self._next = 0.0

    def looked(self) -> None:
        now = seconds()
        if now < self._next:
            return
        self._next = now + LOOK_S / 2  # other events do not increase the polling rate
        event = self.processes.look(now)
        if event is None or self.asked is not None or self.hung is not None:
            return
        self.supervisor.observed(event, self)
        if event.kind == "hung":
            self.hung = event
            self._kill()

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
            self.processes.held(seconds())
        if first and self.asked is not None and self._living():
            self.event_fifo.after(self.supervisor.grace_s, "grace")

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


class Supervisor:
    """Supervises the program ``argv``.

    ``restarts`` is the maximum number of restarts. ``grace_s`` is the time for a last checkpoint after a
    request to exit. ``incidents`` is the file for a line per incident. After ``run``, ``ended_by`` is the
    signal by which the user ended it, or None."""

    def __init__(
        self,
        title: str,
        argv: Sequence[str],
        restarts: int,
        grace_s: float,
        hang_after_s: float,
        incidents: Path,
    ) -> None:
        if not hasattr(select, "epoll") or not hasattr(os, "posix_fallocate"):
            raise UsageError(f"--supervise needs Linux, and this is {sys.platform}. Remove --supervise.")
        self.argv, self.restarts, self.grace_s, self.hang_after_s = (
            list(argv),
            restarts,
            grace_s,
            hang_after_s,
        )
        self.incidents, self.written = incidents, 0
        self.title = f"`{title if len(title) <= MOST_TYPED else title[:MOST_TYPED] + '...'}`"
        self.history = RestartHistory()
        self.ended_by: int | None = None

    def run(self) -> int:
        """Run until the program has ended for good, and return its exit code. Call it from the main thread.

        Raises ProgramNotFound, StorageError."""
        self.folder = temporary("watched", in_memory=True)
        (self.folder / "begun").touch()
        self.event_fifo = EventFifo(self.folder)
        with LauncherSignals() as self.signals:
            reaper = Reaper(str(self.folder), MARKED)
            try:
                while True:
                    attempt, ending = self._attempt()
                    why = self._why_not_again(attempt, ending)
                    if why is not None:
                        break
                if why:
                    self.say(f"not restarted: {why}.")
                self._sum_up()
                return ending.code
            finally:
                self.event_fifo.close()
                reaper.dismiss()
                remove(self.folder)

    # -- one start -------------------------------------------------------------------------------------------

    def _attempt(self) -> tuple[Attempt, Ending]:
        for kind in ("heartbeat", "stack", "failed"):
            for path in self.folder.glob(f"{kind}.*"):
                path.unlink(missing_ok=True)
        self.event_fifo.hush()  # discard timers and events of the last start
        attempt = Attempt(len(self.history.attempts) + 1, base=self.history.kept)
        self.history.attempts.append(attempt)
        environment = {
            **os.environ,
            MARKED: str(self.folder),
            "FLATOUT_CRASH_REPORTS": str(self.folder / f"reported{attempt.number}"),
            "FLATOUT_FIRST": "",
        }
        shares_group, kills = in_foreground(), oom_kills()
        rank = Rank(0, self.argv, environment, not shares_group, self.signals.give_back)
        monitor = StartMonitor(self, rank, attempt, shares_group)
        ended = False
        try:
            monitor.until_the_end()
            ended = True
        finally:
            if not ended:
                end_members(str(self.folder), MARKED)
            rank.close()
        processes = monitor.processes
        processes.look(seconds())
        attempt.steps, attempt.saves = processes.steps, processes.saves
        attempt.base = self.history.kept if processes.went_on or not attempt.steps else 0
        attempt.kept = processes.kept(attempt.base)
        ending = self._ending(monitor, kills)
        if ending.kind != "well":  # processes that a successful program leaves running may continue
            end_members(str(self.folder), MARKED)
        if ending.kind not in ("well", "asked"):
            self._failed(attempt, ending, monitor)
        return attempt, ending

    def _ending(self, monitor: StartMonitor, kills: int | None) -> Ending:
        rank, processes = monitor.ranks[0], monitor.processes
        code = -signal.SIGKILL if rank.process.returncode is None else rank.process.returncode
        asked = monitor.asked_by(code)
        if asked is not None:
            name = signal.Signals(asked).name
            if monitor.late:
                self.say(
                    f"{self.title} did not exit within {self.grace_s:g} s of {name} and was killed. Increase --grace."
                )
            self.ended_by = asked if rank.killed or code == -asked else None
            return Ending("asked", 128 + asked if rank.killed else exit_code(code), f"ended by {name}")
        if monitor.hung is not None:
            return Ending("hung", ProgramHung.exit_code, monitor.hung.message, monitor.hung.place)
        step = processes.word(heartbeat.NOT_FINITE)
        if step:
            return Ending(
                "nan",
                NotFinite.exit_code,
                f"the loss of step {step} was NaN or infinite, so --on-nan stop ended the program",
                advice="an earlier checkpoint has finite weights; a lower learning rate or gradient clipping may help",
            )
        if code == 0:
            return Ending("well", 0, "")
        after = oom_kills()
        by_kernel = None if kills is None or after is None else after > kills
        return ending_of(code, self.title, failures_in(str(self.folder)), by_kernel, processes.steps)

    # -- what is said and written ----------------------------------------------------------------------------

    def observed(self, event: ProcessEvent, monitor: StartMonitor) -> None:
        """Report an event when it is detected, before a hung program is ended."""
        if event.kind == "hung":
            again = self.history.again("hung", event.place)
            self.say(f"{event.message}{'; the same as before' if again else ''}.")
            for line in event.lines if not again else ():
                self.say(line)
            return
        self.say(f"{event.message}.")
        attempt, kept = monitor.attempt, monitor.processes.kept(monitor.attempt.base)
        self._write(attempt.number, "stopped", event.message, "", event.step, kept, None)

    def _failed(self, attempt: Attempt, ending: Ending, monitor: StartMonitor) -> None:
        if monitor.hung is None:
            again = self.history.again(ending.kind, ending.place)
            where = f", at {ending.place}" if ending.place else ""
            self.say(f"{ending.what}{where}{'; the same as before' if again else ''}.")
        self.history.note(attempt)
        self._write(
            attempt.number, ending.kind, ending.what, ending.place, attempt.reached, attempt.kept, ending.code
        )

    def _why_not_again(self, attempt: Attempt, ending: Ending) -> str | None:
        """Return why the program is not restarted; None if it is."""
        if ending.kind in ("well", "asked"):
            return ""
        if ending.kind == "nan":
            return ending.advice
        why = self.history.why_not_again(ending, attempt, self.restarts)
        if why:
            return why
        newest = attempt.kept or self.history.kept
        kept = (
            f"its newest checkpoint is of step {newest}"
            if newest
            else "no checkpoint is known, so the program decides where to start"
        )
        self.say(f"restarted ({attempt.number} of at most {self.restarts}): {kept}.")
        return None

    def _write(self, *values: Any) -> None:
        """Write a line of `incidents.jsonl`. ``values`` are those of an Incident, without its time."""
        line = sanitize(json.dumps(asdict(Incident(today(), *values)))) + "\n"
        try:
            self.incidents.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(
                self.incidents, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)
            self.written += 1
        except OSError as error:
            self.say(
                f"{self.incidents} cannot be written ({error.strerror}), so this incident is not saved. The program is not affected."
            )

    def _sum_up(self) -> None:
        """Print one summary line, if there were steps."""
        reached = max(attempt.reached for attempt in self.history.attempts)
        if not reached:
            return
        restarts = len(self.history.attempts) - 1
        word = "no restart" if not restarts else "1 restart" if restarts == 1 else f"{restarts} restarts"
        where = f"; the incidents are in {self.incidents}" if self.written else ""
        self.say(f"{reached:,} step{'s' if reached > 1 else ''}, {word}{where}.")

    def say(self, sentence: str) -> None:
        """Write to standard error, which may already be closed."""
        try:
            sys.stderr.write(f"flatout: {sanitize(sentence.removeprefix('flatout: '))}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass


def main() -> int:
    """Supervise a command. Arguments: RESTARTS GRACE HANG_AFTER INCIDENTS TITLE COMMAND..."""
    open_closed_streams()
    restarts, grace, hang_after, incidents, title, *command = sys.argv[1:]
    job = _own_job()
    try:
        supervisor = Supervisor(
            title, command, int(restarts), float(grace), float(hang_after), Path(incidents)
        )
        code = supervisor.run()
    except FlatoutError as error:
        sys.stderr.write(f"flatout: {error}\n")
        return error.exit_code
    finally:
        if job is not None:
            remove(job.parent)
    if supervisor.ended_by is not None:
        exit_by_signal(supervisor.ended_by)
    return code


def _own_job() -> Path | None:
    """Return the job created for this run, which ends with it; not that of an enclosing `flatout run`."""
    path = os.environ.get("FLATOUT_JOB")
    info = read_json(Path(path)) if path else None
    return Path(path) if path and isinstance(info, dict) and info.get("pid") == os.getpid() else None
