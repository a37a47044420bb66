"""Monitor the ranks of a launch: record their exits, end the others after a failure, forward signals.

All events come through one epoll, in the order in which they happened: process exits (pidfd), the event FIFO
that failing ranks write to, and signals. So the rank that failed first does not depend on when we wake up.
"""

import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.launch.failure import EXITED, EXITING, FAILING, RankEvent
from flatout.launch.launcher_signals import STOP_SIGNALS, LauncherSignals, ReceivedSignal, stop_self
from flatout.launch.rank import Rank

KILL_S = 1.5  # after the first failure: with the time to kill, everything has exited within 2 s
CAUSE_WAIT_S = 0.25  # to wait for the cause, if the first failing rank only lost another one
EXIT_NOTICE_S = 30.0  # after rank 0 has exited, until the ranks still running are reported
REPEATED_SIGNAL_S = 0.4  # signals within this time count as one: `timeout` sends its signal twice
STUCK_S = 5.0


MAX_PIPE_BYTES = 1 << 16  # what a pipe holds


class EventFifo:
    """A named pipe that ranks (`agent.failure_report`) and our timers write lines to.

    The reader gets all events from one descriptor, in the order in which they were written. Raises OSError if the
    folder cannot hold a named pipe."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / "event_fifo", 0o600)
        # read-write, so that it never reaches end of file
        self.descriptor = os.open(folder / "event_fifo", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._timers: list[threading.Timer] = []

    def lines(self) -> list[list[str]]:
        """The words of each line that has arrived. Call it when the descriptor is readable."""
        text = os.read(self.descriptor, MAX_PIPE_BYTES).decode(errors="replace")
        return [line.split() for line in text.splitlines()]

    def start_timer(self, seconds: float, name: str) -> None:
        """Write ``timer word`` to the FIFO after that time."""
        timer = threading.Timer(seconds, self._write_timer, [name])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _write_timer(self, name: str) -> None:
        try:
            os.write(self.descriptor, f"timer {name}\n".encode())
        except OSError:
            pass  # the FIFO is closed

    def reset(self) -> None:
        """Cancel all timers and discard pending events."""
        for timer in self._timers:
            timer.cancel()
            timer.join()  # the number of a closed descriptor may be reused
        self._timers.clear()
        try:
            os.read(self.descriptor, MAX_PIPE_BYTES)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self.reset()
        os.close(self.descriptor)


class RankMonitor:
    """The monitor of a launch.

    ``events`` are the events of the ranks, in order. ``stop_signal`` is the signal by which the user requested the
    exit, or None. ``shares_group``: the ranks are in our process group, so signals typed at the terminal
    reach them directly."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        folder: Path,
        event_fifo: EventFifo,
        signals: LauncherSignals,
        shares_group: bool,
        report: Callable[[str], None],
    ) -> None:
        self.ranks, self.folder, self.event_fifo, self.signals = ranks, folder, event_fifo, signals
        self.shares_group, self.report = shares_group, report
        self.events: list[RankEvent] = []
        self.stop_signal: int | None = None
        self._forwarded: set[int] = set()
        self._second_kills = False
        self.poll_interval_s: float | None = None  # how often `poll` is called without events; None: never
        self._failing = False  # a rank failed
        self._ending = False  # the others were asked to exit
        self._stuck = False  # some cannot be killed

    def run(self) -> None:
        exits = {rank.exit_fd: rank for rank in self.ranks if rank.exit_fd >= 0}
        with select.epoll() as epoll:
            for descriptor in (self.signals.descriptor, self.event_fifo.descriptor, *exits):
                epoll.register(descriptor, select.EPOLLIN)
            while self._running() and not self._stuck:
                for descriptor, _ in epoll.poll(self.poll_interval_s):
                    if descriptor in exits:
                        epoll.unregister(descriptor)
                        self._on_exit(exits[descriptor])
                    elif descriptor == self.signals.descriptor:
                        for received in self.signals.take():
                            self._on_signal(received)
                    else:
                        for line in self.event_fifo.lines():
                            self._on_fifo_line(*line)
                self.poll()

    def poll(self) -> None:
        """Called after each round of events; subclasses override it to poll."""

    def _running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.is_running]

    # -- what comes

    def _on_fifo_line(self, word: str = "", number: str = "", pid: str = "", first: str = "") -> None:
        if word == "timer":
            self._on_timer(number)
        if not number.isdigit() or int(number) >= len(self.ranks):
            return
        rank = self.ranks[int(number)]
        from_rank = pid == str(rank.process.pid)
        if word == FAILING or (word == EXITING and from_rank):
            event = RankEvent(rank.number, word, from_rank=from_rank, asked_to_exit=rank.asked_to_exit)
            # it failed first, but wrote later
            later = [index for index, other in enumerate(self.events) if first and other.kind == FAILING]
            self.events.insert(min(later, default=len(self.events)), event)
        elif word == "reported" and from_rank and not rank.asked_to_exit:
            self._on_failure(rank)

    def _on_signal(self, received: ReceivedSignal) -> None:
        if received.number == signal.SIGCHLD:
            for rank in self._running():
                if rank.exit_fd < 0:
                    self._on_exit(rank)
            return
        if not (received.typed and self.shares_group):
            self._send(received.number)
        if received.number == signal.SIGTSTP:
            stop_self()
            self._send(signal.SIGCONT)
            return
        self._forwarded.add(received.number)
        if received.number in STOP_SIGNALS and not self._failing:
            if self.stop_signal is None:
                self.stop_signal = received.number
                self.event_fifo.start_timer(REPEATED_SIGNAL_S, "insist")
            elif self._second_kills:
                self._kill()

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def _on_exit(self, rank: Rank) -> None:
        code = rank.process.poll()
        if code is None:
            return
        self.events.append(
            RankEvent(rank.number, EXITED, code, asked_to_exit=rank.asked_to_exit, killed=rank.killed)
        )
        if -code in self._forwarded and not self._failing and self.stop_signal is None:
            self.stop_signal = -code  # an unhandled signal counts as a request to exit
        if code != 0 and not rank.asked_to_exit:
            self._on_failure(rank)
        if rank.number == 0 and not self._failing:
            self.event_fifo.start_timer(EXIT_NOTICE_S, "silence")

    def _on_timer(self, word: str) -> None:
        if word == "end":
            self._end_others()
        elif word == "kill":
            self._kill()
        elif word == "insist":
            self._second_kills = True
        elif word == "silence" and not self._failing:
            self.report(
                f"flatout: rank 0 exited {EXIT_NOTICE_S:.0f} s ago; still running: {self._titles()}. Waiting for them; Ctrl-C ends them."
            )
        elif word == "stuck":
            self._stuck = True
            self.report(
                f"flatout: {self._titles()} cannot be killed: stuck in the kernel, usually in a driver or a file system. "
                "`ps -o pid,stat,wchan` shows where."
            )

    def _titles(self) -> str:
        return ", ".join(rank.title for rank in self._running())

    # -- what follows

    def _on_failure(self, rank: Rank) -> None:
        """End the launch after the first failure.

        A rank that only lost another one may be observed before the lost rank, so that one gets a moment."""
        if self.stop_signal is not None or self._ending:
            return
        if not self._failing:
            self._failing = True
            self.event_fifo.start_timer(KILL_S, "kill")
        if rank.lost_another(self.folder):
            self.event_fifo.start_timer(CAUSE_WAIT_S, "end")
        else:
            self._end_others()

    def _end_others(self) -> None:
        """Ask the other ranks to exit.

        Ranks that are already exiting have until the kill: their exit codes matter."""
        if self._ending:
            return
        self._ending = True
        exiting = {event.rank for event in self.events}
        for rank in self._running():
            if rank.number not in exiting:
                rank.asked_to_exit = True
                rank.signal(signal.SIGTERM)
                rank.signal(signal.SIGCONT)  # a stopped rank would not receive it

    def _kill(self) -> None:
        for rank in self._running():
            rank.asked_to_exit = rank.killed = True
            rank.signal(signal.SIGKILL)
        self.event_fifo.start_timer(STUCK_S, "stuck")
