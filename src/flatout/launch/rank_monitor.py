"""Monitor the ranks of a launch: record their exits, end the others after a failure, forward signals.

All events come through one epoll, in the order in which they happened: process exits (pidfd), the event FIFO
that failing ranks write to, and signals. So the rank that failed first does not depend on when we wake up.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.launch.event_fifo import EventFifo
from flatout.launch.failure import ENDED, FAILING, LEAVING, RankEvent
from flatout.launch.launcher_signals import ASKING_TO_END, LauncherSignals, ReceivedSignal, hold
from flatout.launch.rank import Rank

KILL_S = 1.5  # after the first failure: with the time to kill, everything has exited within 2 s
SECOND_LOOK_S = 0.25  # to wait for the cause, if the first failing rank only lost another one
SILENCE_S = 30.0  # after rank 0 has exited, until the ranks still running are reported
ONE_PRESS_S = 0.4  # signals within this time count as one: `timeout` sends its signal twice
STUCK_S = 5.0


class RankMonitor:
    """The monitor of a launch.

    ``signs`` are the events of the ranks, in order. ``asked`` is the signal by which the user requested the
    exit, or None. ``shares_group``: the ranks are in our process group, so signals typed at the terminal
    reach them directly.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        folder: Path,
        event_fifo: EventFifo,
        signals: LauncherSignals,
        shares_group: bool,
        say: Callable[[str], None],
    ) -> None:
        self.ranks, self.folder, self.event_fifo, self.signals = ranks, folder, event_fifo, signals
        self.shares_group, self.say = shares_group, say
        self.signs: list[RankEvent] = []
        self.asked: int | None = None
        self._passed: set[int] = set()
        self._may_insist = False
        self.every_s: float | None = None  # how often `looked` is called without events; None: never
        self._failing = self._ending = self._stuck = (
            False  # a rank failed; the others were asked to exit; some cannot be killed
        )

    def until_the_end(self) -> None:
        ends = {rank.end: rank for rank in self.ranks if rank.end >= 0}
        with select.epoll() as events:
            for descriptor in (self.signals.descriptor, self.event_fifo.descriptor, *ends):
                events.register(descriptor, select.EPOLLIN)
            while self._living() and not self._stuck:
                for descriptor, _ in events.poll(self.every_s):
                    if descriptor in ends:
                        events.unregister(descriptor)
                        self._ended(ends[descriptor])
                    elif descriptor == self.signals.descriptor:
                        for each in self.signals.take():
                            self._observed(each)
                    else:
                        for line in self.event_fifo.lines():
                            self._rung(*line)
                self.looked()

    def looked(self) -> None:
        """Called after each round of events; subclasses override it to poll."""

    def _living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.lives]

    # -- what comes ------------------------------------------------------------------------------------------

    def _rung(self, word: str = "", number: str = "", pid: str = "", first: str = "") -> None:
        """Handle a line of the event FIFO: from a rank, a program that a rank started, or a timer."""
        if word == "timer":
            self._timed(number)
        if not number.isdigit() or int(number) >= len(self.ranks):
            return
        rank = self.ranks[int(number)]
        own = pid == str(rank.process.pid)
        if word == FAILING or (word == LEAVING and own):
            before = [
                at for at, sign in enumerate(self.signs) if first and sign.kind == FAILING
            ]  # it failed first, but wrote later
            self.signs.insert(
                min(before, default=len(self.signs)), RankEvent(rank.number, word, own=own, info=rank.info)
            )
        elif word == "reported" and own and not rank.info:
            self._failure_seen(rank)

    def _observed(self, observed: ReceivedSignal) -> None:
        if observed.number == signal.SIGCHLD:
            for rank in self._living():
                if rank.end < 0:
                    self._ended(rank)
            return
        if not (observed.typed and self.shares_group):
            self._send(observed.number)
        if observed.number == signal.SIGTSTP:
            hold()
            self._send(signal.SIGCONT)
            return
        self._passed.add(observed.number)
        if observed.number in ASKING_TO_END and not self._failing:
            if self.asked is None:
                self.asked = observed.number
                self.event_fifo.after(ONE_PRESS_S, "insist")
            elif self._may_insist:
                self._kill()

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def _ended(self, rank: Rank) -> None:
        code = rank.process.poll()
        if code is None:
            return
        self.signs.append(RankEvent(rank.number, ENDED, code, info=rank.info, killed=rank.killed))
        if -code in self._passed and not self._failing and self.asked is None:
            self.asked = -code  # an unhandled signal counts as a request to exit
        if code != 0 and not rank.info:
            self._failure_seen(rank)
        if rank.number == 0 and not self._failing:
            self.event_fifo.after(SILENCE_S, "silence")

    def _timed(self, word: str) -> None:
        if word == "end":
            self._end_others()
        elif word == "kill":
            self._kill()
        elif word == "insist":
            self._may_insist = True
        elif word == "silence" and not self._failing:
            self.say(
                f"flatout: rank 0 exited {SILENCE_S:.0f} s ago; still running: {self._titles()}. Waiting for them; Ctrl-C ends them."
            )
        elif word == "stuck":
            self._stuck = True
            self.say(
                f"flatout: {self._titles()} cannot be killed: stuck in the kernel, usually in a driver or a file system. "
                "`ps -o pid,stat,wchan` shows where."
            )

    def _titles(self) -> str:
        return ", ".join(rank.title for rank in self._living())

    # -- what follows ----------------------------------------------------------------------------------------

    def _failure_seen(self, rank: Rank) -> None:
        """End the launch after the first failure.

        A rank that only lost another one may be observed before the lost rank, so that one gets a moment."""
        if self.asked is not None or self._ending:
            return
        if not self._failing:
            self._failing = True
            self.event_fifo.after(KILL_S, "kill")
        if rank.lost_another(self.folder):
            self.event_fifo.after(SECOND_LOOK_S, "end")
        else:
            self._end_others()

    def _end_others(self) -> None:
        """Ask the other ranks to exit.

        Ranks that are already exiting have until the kill: their exit codes matter."""
        if self._ending:
            return
        self._ending = True
        leaving = {sign.rank for sign in self.signs}
        for rank in self._living():
            if rank.number not in leaving:
                rank.info = True
                rank.signal(signal.SIGTERM)
                rank.signal(signal.SIGCONT)  # a stopped rank would not receive it

    def _kill(self) -> None:
        for rank in self._living():
            rank.info = rank.killed = True
            rank.signal(signal.SIGKILL)
        self.event_fifo.after(STUCK_S, "stuck")
