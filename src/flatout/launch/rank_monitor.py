"""Monitor the ranks of a launch: record their exits, end the others after a failure, forward signals.

All events come through one epoll, in the order in which they happened: process exits (pidfd), the event FIFO
that failing ranks write to, and signals. So the rank that failed first does not depend on when we wake up.
"""

import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.launch.event_fifo import EventFifo
from flatout.launch.failure import EXITED, EXITING, FAILING, RankEvent
from flatout.launch.launcher_signals import STOP_SIGNALS, LauncherSignals, ReceivedSignal, stop_self
from flatout.launch.rank import Rank

KILL_S = 1.5  # after the first failure: with the time to kill, everything has exited within 2 s
CAUSE_WAIT_S = 0.25  # to wait for the cause, if the first failing rank only lost another one
EXIT_NOTICE_S = 30.0  # after rank 0 has exited, until the ranks still running are reported
REPEATED_SIGNAL_S = 0.4  # signals within this time count as one: `timeout` sends its signal twice
STUCK_S = 5.0


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
        self._failing = self._ending = self._stuck = (
            False  # a rank failed; the others were asked to exit; some cannot be killed
        )

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
            # it failed first, but wrote later
            earlier = [
                position for position, event in enumerate(self.events) if first and event.kind == FAILING
            ]
            self.events.insert(
                min(earlier, default=len(self.events)),
                RankEvent(rank.number, word, from_rank=from_rank, asked_to_exit=rank.asked_to_exit),
            )
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
