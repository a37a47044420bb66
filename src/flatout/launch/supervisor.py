"""Watches over one program: starts it, passes on what it is told, finds out when it hangs or has died, and starts it again while that brings it further.

The program has our input, output, terminal and place among processes; signals reach it as they would without us. Whatever it has started is known by
FLATOUT_PULSE, and ends with it. Clocks are handed in. Linux only.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.launch.attempts import Attempt, Course, Ending, Incident, ending_of, failures_in, kills_for_memory
from flatout.launch.bell import Bell
from flatout.launch.failure import exit_code
from flatout.launch.hearing import ASKING_TO_END, Heard, Signals, in_foreground
from flatout.launch.incidents import Book
from flatout.launch.keeper import Keeper, end_members
from flatout.launch.rank import Rank
from flatout.launch.silence import LOOK_S
from flatout.launch.watched import Event, Watched
from flatout.launch.watching import Watch
from flatout.plan import pulse
from flatout.plan.errors import NotFinite, ProgramHung, StorageError, UsageError

MEMORY = "/dev/shm"  # pages on a disk would have to be written, and a disk that is full or slow would hold the program
MARKED = pulse.FOLDER
MOST_TYPED = 80  # characters of a command, in a sentence
STARTS_S = 0.1  # between two looks at a program that starts: what a restart costs is told in tenths of a second


@dataclass(frozen=True)
class Terms:
    """``restarts``: at most so many. ``grace_s``: what a program that was told to end has for its last save. ``hang_after_s``: in the place of the ten seconds
    that are the least before a silent one is suspected."""

    restarts: int
    grace_s: float
    hang_after_s: float | None = None


@dataclass(frozen=True)
class Clocks:
    """Seconds that go by, and the moment in words."""

    seconds: Callable[[], float]
    today: Callable[[], str]


class Guard(Watch):
    """One start of the program. ``hung`` is what was found, where that ended it; ``late``: it did not end in its time after it was told to."""

    def __init__(self, rank: Rank, folder: Path, bell: Bell, signals: Signals, shares_group: bool, watched: Watched, attempt: Attempt, terms: Terms,
                 clocks: Clocks, hears: Callable[[Event], None], steps: Callable[[], None], say: Callable[[str], None]) -> None:
        super().__init__([rank], folder, bell, signals, shares_group, say)
        self.every_s = STARTS_S
        self.watched, self.attempt, self.terms, self.clocks, self.hears, self.steps = watched, attempt, terms, clocks, hears, steps
        self.hung: Event | None = None
        self.late = False
        self._next = 0.0

    def looked(self) -> None:
        now = self.clocks.seconds()
        if now < self._next:
            return
        self.every_s = LOOK_S if self.attempt.stepped is not None else STARTS_S
        self._next = now + self.every_s / 2  # events of other kinds do not make it look more often
        events = self.watched.look(now)
        self.note(now)
        for event in events:
            if event.kind == "stopped":
                self.hears(event)
            elif self.hung is None and self.asked is None:
                self.hung = event
                self.hears(event)
                self._kill()

    def note(self, now: float) -> None:
        """What this start has brought so far."""
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
        """The signal by which a person has asked for the end. One that does not ask by itself (SIGUSR1) has, where the program ends by saying its number."""
        return self.asked if self.asked is not None else code - 128 if code - 128 in self._passed else None

    def _heard(self, heard: Heard) -> None:
        if heard.number in ASKING_TO_END and self.asked is not None and not self._may_insist:
            return  # the same press once more
        first = self.asked is None
        super()._heard(heard)
        if heard.number == signal.SIGTSTP:
            self.watched.held(self.clocks.seconds())
        if first and self.asked is not None and self._living():
            self.bell.after(self.terms.grace_s, "grace")

    def _timed(self, word: str) -> None:
        if word == "grace" and self._living():
            self.late = True
            self._kill()
        else:
            super()._timed(word)

    def _kill(self) -> None:
        """All of it: what it has started must not go on by itself."""
        super()._kill()
        end_members(str(self.folder), MARKED)


class Supervisor:
    """``argv`` with ``environment`` is the program. After ``run``, ``ended_by`` is the signal by which a person ended it, None where none did."""

    def __init__(self, title: str, argv: Sequence[str], environment: Mapping[str, str], terms: Terms, clocks: Clocks, book: Book,
                 say: Callable[[str], None]) -> None:
        if not hasattr(select, "epoll") or not hasattr(os, "posix_fallocate"):
            raise UsageError(f"programs are watched over on Linux alone so far, and this is {sys.platform}. Leave --supervise away.")
        self.argv, self.environment, self.terms, self.clocks, self.book, self.say = list(argv), dict(environment), terms, clocks, book, say
        self.title = f"`{title if len(title) <= MOST_TYPED else title[:MOST_TYPED] + '...'}`"
        self.course = Course()
        self.ended_by: int | None = None
        self._open: Incident | None = None  # its restart has not come to a step yet

    def run(self) -> int:
        """Until the program has ended for good: its exit code. Raises ProgramNotFound, StorageError. Called from the main thread."""
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="flatout-watched-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
            (self.folder / "begun").touch()
            bell = Bell(self.folder)
        except OSError as error:
            raise StorageError(f"cannot make a folder in {tempfile.gettempdir()}: {error.strerror}. Name another one with TMPDIR.") from error
        with Signals() as signals:
            keeper = Keeper(str(self.folder), MARKED)
            try:
                return self._run(signals, bell)
            finally:
                bell.close()
                keeper.dismiss()
                shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, signals: Signals, bell: Bell) -> int:
        while True:
            attempt, ending = self._attempt(signals, bell)
            why = self._why_not_again(attempt, ending)
            if why is None:
                continue
            self._close("the end")
            if why:
                self.say(f"not started again: {why}.")
            self._sum_up(well=ending.kind == "well")
            return ending.code

    # -- one start ----------------------------------------------------------------------------------------------------------

    def _attempt(self, signals: Signals, bell: Bell) -> tuple[Attempt, Ending]:
        self._tidy()
        bell.hush()  # what was to happen to the last one must not happen to this one
        attempt = Attempt(len(self.course.attempts) + 1, self.clocks.seconds(), base=self.course.kept)
        self.course.attempts.append(attempt)
        environment = {**self.environment, MARKED: str(self.folder), "FLATOUT_TOLD": str(self.folder / f"told{attempt.number}"), "FLATOUT_FIRST": ""}
        shares_group = in_foreground()
        kills = kills_for_memory()
        rank = Rank(0, self.argv, environment, not shares_group, signals.give_back)
        watched = Watched(str(self.folder), attempt.began, self.terms.hang_after_s)
        guard = Guard(rank, self.folder, bell, signals, shares_group, watched, attempt, self.terms, self.clocks,
                      lambda event: self._hears(event, attempt, watched), lambda: self._came_to_a_step(attempt), lambda said: self.say(said))
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
        if ending.kind != "well":  # what a program that has ended well leaves running is meant to run
            end_members(str(self.folder), MARKED)
        attempt.ended = self.clocks.seconds()
        if ending.kind not in ("well", "asked"):
            self._failed(attempt, ending, guard, now)
        return attempt, ending

    def _tidy(self) -> None:
        for kind in ("pulse", "stack", "workers", "failed"):
            for path in self.folder.glob(f"{kind}.*"):
                path.unlink(missing_ok=True)

    def _ending(self, guard: Guard, code: int, watched: Watched, kills: int | None) -> Ending:
        asked = guard.asked_by(code)
        if asked is not None:
            if guard.late:
                self.say(f"{self.title} had not ended {self.terms.grace_s:g} s after {signal.Signals(asked).name}, and was ended. --grace gives it longer.")
            killed = guard.ranks[0].killed
            self.ended_by = asked if killed or code == -asked else None
            return Ending("asked", 128 + asked if killed else exit_code(code), f"ended by {signal.Signals(asked).name}")
        if guard.hung is not None:
            return Ending("hung", ProgramHung.exit_code, guard.hung.said, guard.hung.place)
        step = watched.word(pulse.NOT_FINITE)
        if step:
            return Ending("nan", NotFinite.exit_code, f"the loss of step {step} was NaN or infinite, and --on-nan stop ends a program there",
                          advice="an earlier save has finite weights; a lower learning rate or clipped gradients may get past it")
        if code == 0:
            return Ending("well", 0, "")
        after = kills_for_memory()
        by_kernel = None if kills is None or after is None else after > kills
        return ending_of(code, self.title, failures_in(str(self.folder)), by_kernel, watched.steps)

    # -- what is said and written -------------------------------------------------------------------------------------------

    def _hears(self, event: Event, attempt: Attempt, watched: Watched) -> None:
        """At the moment when it is found; a hung program is ended only then."""
        if event.kind == "hung":
            again = self.course.again("hung", event.place)
            self.say(f"{event.said}{'; the same as before' if again else ''}.")
            for line in event.lines if not again else ():
                self.say(line)
            return
        self.say(f"{event.said}.")
        self.book.write(Incident(self.clocks.today(), attempt.number, event.kind, event.said, event.place, event.pid, event.rank, event.step,
                                 watched.kept(attempt.base), None, event.silent_s, followed_by="continued"))

    def _failed(self, attempt: Attempt, ending: Ending, guard: Guard, found: float) -> None:
        self._close("the next failure")
        hung, assert_ended = guard.hung, attempt.ended or found
        if hung is None:
            again = self.course.again(ending.kind, ending.place)
            where = f", at {ending.place}" if ending.place else ""
            self.say(f"{ending.what}{where}{'; the same as before' if again else ''}.")
        self.course.note(attempt)
        pid, rank = (hung.pid, hung.rank) if hung is not None else (guard.ranks[0].process.pid, None)
        self._open = Incident(self.clocks.today(), attempt.number, ending.kind, ending.what, ending.place, pid, rank, attempt.reached, attempt.kept,
                              ending.code, hung.silent_s if hung is not None else 0.0, assert_ended - found, lines=hung.lines if hung is not None else ())

    def _why_not_again(self, attempt: Attempt, ending: Ending) -> str | None:
        """None where it is started again."""
        if ending.kind in ("well", "asked"):
            return ""
        if ending.kind == "nan":
            return ending.advice
        why = self.course.why_not_again(ending, attempt, self.terms.restarts)
        if why:
            return why
        kept = f"its newest save is of step {attempt.kept}" if attempt.kept else f"its newest save is of step {self.course.kept}" if self.course.kept \
            else "it has told of no save, so it begins where it finds itself"
        self.say(f"started again ({attempt.number} of at most {self.terms.restarts}): {kept}.")
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
        """One line about the whole, where steps were heard."""
        attempts = self.course.attempts
        reached = max(each.reached for each in attempts)
        if not reached:
            return
        now = attempts[-1].ended or self.clocks.seconds()
        restarts = len(attempts) - 1
        word = "no restart" if not restarts else "1 restart" if restarts == 1 else f"{restarts} restarts"
        where = f"; what happened is in {self.book.path}" if self.book.written else ""
        steps = f"{reached:,} step{'s' if reached > 1 else ''} in {now - attempts[0].began:.0f} s"
        self.say(f"{steps}, {word}; {self.course.goodput(now, well):.0%} of the time brought steps that were kept{where}.")
