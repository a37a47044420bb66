"""Watches the ranks of a launch until the last one has ended: hears how each ends, ends the others when one has failed, passes signals on.

Everything comes through one epoll, which gives events in the order in which they happened: ends of processes (pidfd), the bell that ranks ring when they
fail, signals. Which rank was first must not depend on how long we have slept.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from flatout.launch.bell import Bell
from flatout.launch.failure import ENDED, FAILING, LEAVING, Sign
from flatout.launch.hearing import ASKING_TO_END, Heard, Signals, hold
from flatout.launch.rank import Rank

KILL_S = 1.5  # from the first failure on: with what killing takes, all is gone within two seconds
SECOND_LOOK_S = 0.25  # for a cause, where the first to be heard has only lost another rank
SILENCE_S = 30.0  # of ranks that go on without rank 0
ONE_PRESS_S = 0.4  # `timeout` sends its signal twice
STUCK_S = 5.0


class Watch:
    """``signs`` are what was heard of the ranks, in order. ``asked`` is the signal by which a person has asked for the end, None where nobody has.

    ``shares_group``: the ranks are in our process group, so what is typed at the terminal reaches them without us.
    """

    def __init__(self, ranks: Sequence[Rank], folder: Path, bell: Bell, signals: Signals, shares_group: bool, say: Callable[[str], None]) -> None:
        self.ranks, self.folder, self.bell, self.signals, self.shares_group, self.say = ranks, folder, bell, signals, shares_group, say
        self.signs: list[Sign] = []
        self.asked: int | None = None
        self._passed: set[int] = set()
        self._may_insist = False
        self.every_s: float | None = None  # how often `looked` is called though nothing has happened; None: never
        self._failing = self._ending = self._stuck = False  # a failure was seen; the others were told; the kernel does not let go of some

    def until_the_end(self) -> None:
        ends = {rank.end: rank for rank in self.ranks if rank.end >= 0}
        with select.epoll() as events:
            for descriptor in (self.signals.descriptor, self.bell.descriptor, *ends):
                events.register(descriptor, select.EPOLLIN)
            while self._living() and not self._stuck:
                for descriptor, _ in events.poll(self.every_s):
                    if descriptor in ends:
                        events.unregister(descriptor)
                        self._ended(ends[descriptor])
                    elif descriptor == self.signals.descriptor:
                        for each in self.signals.take():
                            self._heard(each)
                    else:
                        for line in self.bell.lines():
                            self._rung(*line)
                self.looked()

    def looked(self) -> None:
        """For who has more to watch over than what is heard."""

    def _living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.lives]

    # -- what comes -------------------------------------------------------------------------------------------------

    def _rung(self, word: str = "", number: str = "", pid: str = "", first: str = "") -> None:
        """A rank has said something, or one of the programs that it has started; or a time is over."""
        if word == "timer":
            self._timed(number)
        if not number.isdigit() or int(number) >= len(self.ranks):
            return
        rank = self.ranks[int(number)]
        own = pid == str(rank.process.pid)
        if word == FAILING or (word == LEAVING and own):
            before = [at for at, sign in enumerate(self.signs) if first and sign.kind == FAILING]  # it was first, but did not ring as fast
            self.signs.insert(min(before, default=len(self.signs)), Sign(rank.number, word, own=own, told=rank.told))
        elif word == "words" and own and not rank.told:
            self._failure_seen(rank)

    def _heard(self, heard: Heard) -> None:
        if heard.number == signal.SIGCHLD:
            for rank in self._living():
                if rank.end < 0:
                    self._ended(rank)
            return
        if not (heard.typed and self.shares_group):
            self._send(heard.number)
        if heard.number == signal.SIGTSTP:
            hold()
            self._send(signal.SIGCONT)
            return
        self._passed.add(heard.number)
        if heard.number in ASKING_TO_END and not self._failing:
            if self.asked is None:
                self.asked = heard.number
                self.bell.after(ONE_PRESS_S, "insist")
            elif self._may_insist:
                self._kill()

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def _ended(self, rank: Rank) -> None:
        code = rank.process.poll()
        if code is None:
            return
        self.signs.append(Sign(rank.number, ENDED, code, told=rank.told, killed=rank.killed))
        if -code in self._passed and not self._failing and self.asked is None:
            self.asked = -code  # a signal that it did not handle was meant to end it
        if code != 0 and not rank.told:
            self._failure_seen(rank)
        if rank.number == 0 and not self._failing:
            self.bell.after(SILENCE_S, "silence")

    def _timed(self, word: str) -> None:
        if word == "end":
            self._end_others()
        elif word == "kill":
            self._kill()
        elif word == "insist":
            self._may_insist = True
        elif word == "silence" and not self._failing:
            self.say(f"flatout: rank 0 has ended {SILENCE_S:.0f} s ago, and these still run: {self._titles()}. Waiting for them; Ctrl-C ends them.")
        elif word == "stuck":
            self._stuck = True
            self.say(f"flatout: {self._titles()} cannot be killed: the kernel holds them, mostly for a driver or a file system. "
                     "`ps -o pid,stat,wchan` shows where.")

    def _titles(self) -> str:
        return ", ".join(rank.title for rank in self._living())

    # -- what follows -----------------------------------------------------------------------------------------------

    def _failure_seen(self, rank: Rank) -> None:
        """The first one ends the launch. One that has only lost another rank may be heard before the one that was lost, which then has a moment left."""
        if self.asked is not None or self._ending:
            return
        if not self._failing:
            self._failing = True
            self.bell.after(KILL_S, "kill")
        if rank.lost_another(self.folder):
            self.bell.after(SECOND_LOOK_S, "end")
        else:
            self._end_others()

    def _end_others(self) -> None:
        """Those who are on their way out by themselves have until the kill: how they end is what we want to know."""
        if self._ending:
            return
        self._ending = True
        leaving = {sign.rank for sign in self.signs}
        for rank in self._living():
            if rank.number not in leaving:
                rank.told = True
                rank.signal(signal.SIGTERM)
                rank.signal(signal.SIGCONT)  # one that is held would not hear of it

    def _kill(self) -> None:
        for rank in self._living():
            rank.told = rank.killed = True
            rank.signal(signal.SIGKILL)
        self.bell.after(STUCK_S, "stuck")
