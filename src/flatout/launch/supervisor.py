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
from flatout.launch.failure import exit_code
from flatout.launch.hang import POLL_S, ProcessEvent, ProgramProcesses
from flatout.launch.launcher_signals import (
    STOP_SIGNALS,
    LauncherSignals,
    ReceivedSignal,
    exit_by_signal,
    in_foreground,
)
from flatout.launch.rank import Rank
from flatout.launch.rank_monitor import EventFifo, RankMonitor
from flatout.launch.reaper import Reaper, end_members
from flatout.launch.restart_policy import (
    Attempt,
    AttemptOutcome,
    Incident,
    RestartHistory,
    failures_in,
    oom_kills,
    outcome_of,
)
from flatout.measure.clock import seconds, utc_now
from flatout.schema.errors import FlatoutError, NotFinite, ProgramHung, UsageError

MARK = heartbeat.FOLDER
MAX_TITLE = 80  # characters of a command in a message


class StartMonitor(RankMonitor):
    """Monitors one start of the program.

    ``hung`` is the hang that ended it, if any. ``grace_expired``: it did not exit in time after a request to."""

    def __init__(self, supervisor: Supervisor, rank: Rank, attempt: Attempt, shares_group: bool) -> None:
        super().__init__(
            [rank],
            supervisor.folder,
            supervisor.event_fifo,
            supervisor.signals,
            shares_group,
            supervisor.report,
        )
        self.poll_interval_s = POLL_S
        self.supervisor, self.attempt = supervisor, attempt
        self.processes = ProgramProcesses(str(self.folder), seconds(), supervisor.hang_after_s)
        self.hung: ProcessEvent | None = None
        self.grace_expired = False
        self._next_poll_s = 0.0

    def poll(self) -> None:
        now = seconds()
        if now < self._next_poll_s:
            return
        self._next_poll_s = now + POLL_S / 2  # other events do not increase the polling rate
        event = self.processes.poll(now)
        if event is None or self.stop_signal is not None or self.hung is not None:
            return
        self.supervisor.observe_event(event, self)
        if event.kind == "hung":
            self.hung = event
            self._kill()

    def requested_signal(self, code: int) -> int | None:
        """The signal by which the user requested the exit.

        A signal that requests nothing by itself (SIGUSR1) counts if the program exits with its number."""
        if self.stop_signal is not None:
            return self.stop_signal
        return code - 128 if code - 128 in self._forwarded else None

    def _on_signal(self, received: ReceivedSignal) -> None:
        if received.number in STOP_SIGNALS and self.stop_signal is not None and not self._second_kills:
            return  # a repetition of the same key press
        first = self.stop_signal is None
        super()._on_signal(received)
        if received.number == signal.SIGTSTP:
            self.processes.skip_pause(seconds())
        if first and self.stop_signal is not None and self._running():
            self.event_fifo.start_timer(self.supervisor.grace_s, "grace")

    def _on_timer(self, name: str) -> None:
        if name == "grace" and self._running():
            self.grace_expired = True
            self._kill()
        else:
            super()._on_timer(name)

    def _kill(self) -> None:
        super()._kill()
        end_members(str(self.folder), MARK)


class Supervisor:
    """Supervises the program ``argv``.

    ``restarts`` is the maximum number of restarts. ``grace_s`` is the time for a last checkpoint after a
    request to exit. ``incidents`` is the file for a line per incident. After ``run``, ``stop_signal`` is the
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
        self.argv, self.restarts = list(argv), restarts
        self.grace_s, self.hang_after_s = grace_s, hang_after_s
        self.incidents, self.incident_count = incidents, 0
        self.title = f"`{title if len(title) <= MAX_TITLE else title[:MAX_TITLE] + '...'}`"
        self.history = RestartHistory()
        self.stop_signal: int | None = None

    def run(self) -> int:
        """Run until the program has ended for good, and return its exit code. Call it from the main thread.

        Raises ProgramNotFound, StorageError."""
        self.folder = temporary("watched", in_memory=True)
        (self.folder / "begun").touch()
        self.event_fifo = EventFifo(self.folder)
        with LauncherSignals() as self.signals:
            reaper = Reaper(str(self.folder), MARK)
            try:
                while True:
                    attempt, outcome = self._attempt()
                    why = self._why_not_restarted(attempt, outcome)
                    if why is not None:
                        break
                if why:
                    self.report(f"not restarted: {why}.")
                self._print_summary()
                return outcome.code
            finally:
                self.event_fifo.close()
                reaper.dismiss()
                remove(self.folder)

    # -- one start

    def _attempt(self) -> tuple[Attempt, AttemptOutcome]:
        for kind in ("heartbeat", "stack", "failed"):
            for path in self.folder.glob(f"{kind}.*"):
                path.unlink(missing_ok=True)
        self.event_fifo.reset()  # discard timers and events of the last start
        attempt = Attempt(len(self.history.attempts) + 1, resumed_step=self.history.checkpoint_step)
        self.history.attempts.append(attempt)
        environment = {
            **os.environ,
            MARK: str(self.folder),
            "FLATOUT_CRASH_REPORTS": str(self.folder / f"reported{attempt.number}"),
            "FLATOUT_FIRST": "",
        }
        shares_group, kills = in_foreground(), oom_kills()
        rank = Rank(0, self.argv, environment, not shares_group, self.signals.restore_mask)
        monitor = StartMonitor(self, rank, attempt, shares_group)
        completed = False
        try:
            monitor.run()
            completed = True
        finally:
            if not completed:
                end_members(str(self.folder), MARK)
            rank.close()
        processes = monitor.processes
        processes.poll(seconds())
        attempt.steps, attempt.checkpoint_count = processes.steps, processes.checkpoint_count
        if attempt.steps and not processes.has_resumed:
            attempt.resumed_step = 0
        attempt.checkpoint_step = processes.newest_checkpoint(attempt.resumed_step)
        outcome = self._outcome(monitor, kills)
        if outcome.kind != "finished":  # processes that a successful program leaves running may continue
            end_members(str(self.folder), MARK)
        if outcome.kind not in ("finished", "stop requested"):
            self._report_failure(attempt, outcome, monitor)
        return attempt, outcome

    def _outcome(self, monitor: StartMonitor, kills: int | None) -> AttemptOutcome:
        rank, processes = monitor.ranks[0], monitor.processes
        code = -signal.SIGKILL if rank.process.returncode is None else rank.process.returncode
        stop_signal = monitor.requested_signal(code)
        if stop_signal is not None:
            name = signal.Signals(stop_signal).name
            if monitor.grace_expired:
                self.report(
                    f"{self.title} did not exit within {self.grace_s:g} s of {name} and was killed. Increase --grace."
                )
            self.stop_signal = stop_signal if rank.killed or code == -stop_signal else None
            return AttemptOutcome(
                "stop requested", 128 + stop_signal if rank.killed else exit_code(code), f"ended by {name}"
            )
        if monitor.hung is not None:
            return AttemptOutcome("hung", ProgramHung.exit_code, monitor.hung.message, monitor.hung.place)
        step = processes.max_of(heartbeat.Slot.NOT_FINITE)
        if step:
            return AttemptOutcome(
                "nan",
                NotFinite.exit_code,
                f"the loss of step {step} was NaN or infinite, so --on-nan stop ended the program",
                advice="an earlier checkpoint has finite weights; a lower learning rate or gradient clipping may help",
            )
        if code == 0:
            return AttemptOutcome("finished", 0, "")
        after = oom_kills()
        by_kernel = None if kills is None or after is None else after > kills
        return outcome_of(code, self.title, failures_in(str(self.folder)), by_kernel, processes.steps)

    # -- what is said and written

    def observe_event(self, event: ProcessEvent, monitor: StartMonitor) -> None:
        """Report an event when it is detected, before a hung program is ended."""
        if event.kind == "hung":
            is_repeated = self.history.is_repeated("hung", event.place)
            self.report(f"{event.message}{'; the same as before' if is_repeated else ''}.")
            for line in event.lines if not is_repeated else ():
                self.report(line)
            return
        self.report(f"{event.message}.")
        attempt = monitor.attempt
        checkpoint = monitor.processes.newest_checkpoint(attempt.resumed_step)
        self._write(attempt.number, "stopped", event.message, "", event.step, checkpoint, None)

    def _report_failure(self, attempt: Attempt, outcome: AttemptOutcome, monitor: StartMonitor) -> None:
        if monitor.hung is None:
            is_repeated = self.history.is_repeated(outcome.kind, outcome.place)
            where = f", at {outcome.place}" if outcome.place else ""
            self.report(f"{outcome.message}{where}{'; the same as before' if is_repeated else ''}.")
        self.history.record_attempt(attempt)
        self._write(
            attempt.number,
            outcome.kind,
            outcome.message,
            outcome.place,
            attempt.reached,
            attempt.checkpoint_step,
            outcome.code,
        )

    def _why_not_restarted(self, attempt: Attempt, outcome: AttemptOutcome) -> str | None:
        if outcome.kind in ("finished", "stop requested"):
            return ""
        if outcome.kind == "nan":
            return outcome.advice
        why = self.history.why_not_restarted(outcome, attempt, self.restarts)
        if why:
            return why
        newest = attempt.checkpoint_step or self.history.checkpoint_step
        checkpoint = "no checkpoint is known, so the program decides where to start"
        if newest:
            checkpoint = f"its newest checkpoint is of step {newest}"
        self.report(f"restarted ({attempt.number} of at most {self.restarts}): {checkpoint}.")
        return None

    def _write(self, *values: Any) -> None:
        """Write a line of `incidents.jsonl`. ``values`` are those of an Incident, without its time."""
        line = sanitize(json.dumps(asdict(Incident(utc_now(), *values)))) + "\n"
        try:
            self.incidents.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(
                self.incidents, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)
            self.incident_count += 1
        except OSError as error:
            self.report(
                f"{self.incidents} cannot be written ({error.strerror}), so this incident is not saved. The program is not affected."
            )

    def _print_summary(self) -> None:
        reached = max(attempt.reached for attempt in self.history.attempts)
        if not reached:
            return
        restarts = len(self.history.attempts) - 1
        summary = "no restart" if not restarts else "1 restart" if restarts == 1 else f"{restarts} restarts"
        where = f"; the incidents are in {self.incidents}" if self.incident_count else ""
        self.report(f"{reached:,} step{'s' if reached > 1 else ''}, {summary}{where}.")

    def report(self, sentence: str) -> None:
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
    if supervisor.stop_signal is not None:
        exit_by_signal(supervisor.stop_signal)
    return code


def _own_job() -> Path | None:
    """The job created for this run, which ends with it; not that of an enclosing `flatout run`."""
    path = os.environ.get("FLATOUT_JOB")
    info = read_json(Path(path)) if path else None
    return Path(path) if path and isinstance(info, dict) and info.get("pid") == os.getpid() else None
