"""Records a program so that it can be gone on with exactly, and brings it to the place of a save when it is started again.

Both are one Listener around another one that saves (`flatout.engine.rescue`). Recorded, it tells the tape of each event and adds to each save what the weights
are not: how far the tape is, and what the program can reach. Played back, it waits for the event at which the save was made; there the program becomes the one
that was saved, and from there on it is recorded.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from flatout.capture.ledger import Ledger
from flatout.capture.listener import Listener
from flatout.plan import pulse
from flatout.plan.errors import FlatoutError, StorageError
from flatout.replay.answers import Skeletons
from flatout.replay.batches import Batches
from flatout.replay.drawn import Drawn
from flatout.replay.files import Files
from flatout.replay.hearing import Hearing
from flatout.replay.quiet import Quiet
from flatout.replay.seam import Draws, Origins, Seam, state_of_world
from flatout.replay.skipping import Skipping
from flatout.replay.tape import Tape
from flatout.replay.world import World
from flatout.state.carrying import Find
from flatout.state.journal import Journal, Place, read_journal
from flatout.state.randoms import random_states, set_random_states

if TYPE_CHECKING:
    from flatout.replay.collectives import Collectives

FORWARD, BACKWARD, WENT_BACKWARD, OPTIMIZER, STEPPED = 2, 3, 4, 5, 6  # events, beside those of batches


@dataclass(frozen=True)
class Way:
    """``journal``: where it lies. ``state``: what `Again.beside` has given to the save that is to be gone on from, None to begin. ``several``: the program has
    ranks, which say things to each other. ``shows``: what it prints on the way is shown. ``fetches``: batches of this process are fetched on the way."""

    journal: Path
    state: dict[str, Any] | None
    several: bool = False
    shows: bool = False
    fetches: bool = False


@dataclass(frozen=True)
class Outside:
    """Who is told. ``say`` is for the person; ``refuse`` ends the process with a sentence, and so does ``astray`` where the way is another one than the first
    time, which may be because data was passed over. ``begins`` is called before anything is written, ``at_seam`` when
    the program has become the one that was saved, with the seconds that this has taken since its training began, and those that it had taken the first time;
    ``left_alone`` with a sentence where it goes on by itself. ``seconds``: a clock."""

    say: Callable[[str], None]
    refuse: Callable[[str], NoReturn]
    astray: Callable[[str], NoReturn]
    begins: Callable[[], None]
    at_seam: Callable[[float, float], None]
    left_alone: Callable[[str], None]
    seconds: Callable[[], float]


class Again(Listener):
    """``saving`` is the listener that saves; it hears nothing before the seam. ``find`` gives the random generators that an object holds."""

    def __init__(self, way: Way, outside: Outside, saving: Listener, ledger: Ledger, find: Find) -> None:
        state = way.state
        self.refuse, self.outside = outside.astray, outside
        self.journal, self.saved, self.saving, self.ledger = way.journal, state, saving, ledger
        self.tape = Tape(self.refuse, outside.say)
        self.skeletons = Skeletons(self.refuse)
        self.skipping = Skipping(self.tape, self.skeletons, ledger)
        self.batches = Batches(self.tape, ledger, self._begins, find)
        self.batches.fetches = way.fetches
        self.files = Files(way.journal.with_name(f"{way.journal.name}.files"), self.tape, outside.refuse, self._resumes_by_itself)
        pulse.when_it_resumes_by_itself(self._resumes_by_itself)
        self.collectives: Collectives | None = None
        if way.several:
            from flatout.replay.collectives import Collectives

            self.collectives = Collectives(self.tape, self.skeletons, ledger)
        self._quiet: Quiet | None = None
        self._origins: Origins | None = None
        self._draws: Draws | None = None
        self._call: Any = None
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # modules that are called by themselves, in order
        self._numbered = 0
        self._began_s = self._trained_s = 0.0  # when the training began, or went on; and how long it had lasted before
        self.pid = os.getpid()
        self.drawn = Drawn(self.tape, ledger)
        self.hearing = Hearing(self.tape, ledger, self.skeletons.lineage.comes_from, self.drawn.taken)
        self.skeletons.shaped_again, self.skeletons.taken = self.hearing.shaped_again, self.drawn.taken
        self.hear()
        os.register_at_fork(after_in_child=self._forked)
        if state is None:
            self._start = random_states(torch)
            self.files.looks()
        else:
            self._start = state["start"]
            self._play(state, way.shows)
        self.files.install()

    def hear(self) -> None:
        """From here on, until the ledger is restored."""
        for each in (self.drawn, self.hearing, self.skipping):
            each.install()

    def install(self) -> None:
        """After what else changes how loaders are made."""
        self.batches.install()

    @property
    def going(self) -> bool:
        return self.tape.going

    @property
    def skips(self) -> bool:
        """Whether the program is still on its way, and its data set was passed over in this process: it may keep count of what it is asked for."""
        return self.saved is not None and bool(self.batches.skipped)

    def _forked(self) -> None:
        self.tape.deaf += 1

    def broke(self, error: Exception) -> None:
        if self.tape.going:
            self.refuse(f"flatout made a mistake ({type(error).__name__}: {error})")

    def ended(self) -> None:
        """The program has come to its own end: there is nothing to go on with."""
        self.journal.unlink(missing_ok=True)
        self.files.ended()

    def _resumes_by_itself(self, place: str) -> None:
        """Nothing is recorded any more, and no save is gone on from."""
        if not self.tape.going and not self.tape.broken:
            self.tape.breaks(f"it resumes by itself, from {os.path.relpath(place)}")
            self.journal.unlink(missing_ok=True)
            self.outside.left_alone(f"this program resumes by itself, from {os.path.relpath(place)}: that is left to it")

    # -- recording ----------------------------------------------------------------------------------------------------------

    def beside(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        """What a save needs so that the program can be gone on with from here, where an event has just happened; and why it could not be, or ""."""
        tape = self.tape
        if tape.deaf > 1:  # one for the listener that saves
            return {}, "its steps end where nothing is heard, inside of a backward pass"
        place = tape.write()
        if place is None or self._origins is None:
            return {}, tape.broken or "its training has not begun"
        world = World().look(frame, self._also())
        state, unsound = state_of_world(world, self._origins)
        unsound += self.files.unsound()
        if self.collectives is not None:
            unsound += self.collectives.unsound()
            state["ranks"] = self.collectives.place()
        return {**state, "start": self._start, "random": random_states(torch), "batches": self.batches.place(), "files": self.files.state(),
                "journal": place.to_json(), "trained_s": self._trained_s + self.outside.seconds() - self._began_s,
                "events": tape.events, "steps": tape.steps}, "; ".join(unsound)

    def met(self) -> dict[str, Any]:
        """How often the ranks have met: the same in all saves of one moment."""
        return self.collectives.met() if self.collectives is not None else {}

    def flush(self) -> None:
        """Until the journal is on the disk."""
        if self.tape.journal is not None:
            self.tape.journal.flush()

    def _also(self) -> dict[str, Any]:
        return {"call": self._call, **self.drawn.held()}

    def _begins(self) -> None:
        """The first batch is taken, or the first module called: what was made before was made for real."""
        if self._origins is None:
            self.tape.began, self._began_s = True, self.outside.seconds()
            self.files.begins()
            if self.collectives is not None:
                self.collectives.begins()
            with self.tape.unheard:
                self._origins = Origins(World().look(sys._getframe(1), {}), everything=self.tape.going)
            if self.tape.going:
                self._draws = Draws()
                self.skipping.starts()
            elif not self.tape.broken:
                self._record_from_here()

    def _record_from_here(self) -> None:
        """What was heard so far is kept, too. Processes that train nothing, such as those that start ranks, never come here."""
        self.outside.begins()
        try:
            self.tape.record(Journal(self.journal))
        except StorageError as error:
            self.tape.breaks(str(error))
            self.outside.say(f"this program cannot be gone on with exactly: {error}")

    @contextmanager
    def for_real(self) -> Iterator[None]:
        """What is done inside is ours: it acts on the tensors that are there, and is nobody's business."""
        with self.skipping.paused(), self.tape.unheard:
            yield

    # -- events -------------------------------------------------------------------------------------------------------------

    def _event(self, what: int) -> bool:
        """Whether the listener that saves hears of it."""
        if not self.tape.hears:  # in the middle of a backward pass, say
            return not self.tape.going
        if self.tape.event(what):
            self._seam(sys._getframe(2))
            return True
        return not self.tape.going

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        self._begins()
        self._call = root, args, kwargs
        if root not in self._numbers:
            self._numbers[root] = self._numbered
            self._numbered += 1
        if self._event(FORWARD + 16 * self._numbers[root]):
            self._passes_on(self.saving.forward_begin, root, args, kwargs)
        self._call = None

    def backward_begin(self, losses: tuple) -> None:
        self._begins()
        if self._event(BACKWARD):
            self._passes_on(self.saving.backward_begin, losses)

    def backward_end(self) -> None:
        if self._event(WENT_BACKWARD):
            self._passes_on(self.saving.backward_end)

    def optimizer_begin(self, optimizer: Any) -> None:
        if self._event(OPTIMIZER):
            self._passes_on(self.saving.optimizer_begin, optimizer)

    def optimizer_end(self, optimizer: Any) -> None:
        if self._event(STEPPED):
            self._passes_on(self.saving.optimizer_end, optimizer)

    def step_end(self) -> None:
        if self.tape.hears:
            self.tape.mark()
        if not self.tape.going:
            self._passes_on(self.saving.step_end)

    def _passes_on(self, event: Callable[..., None], *about: Any) -> None:
        """What is read for a save is nobody's business."""
        with self.tape.unheard:
            event(*about)

    # -- playing back -------------------------------------------------------------------------------------------------------

    def _play(self, state: dict[str, Any], shows: bool) -> None:
        self.tape.play(read_journal(self.journal, Place.from_json(state["journal"])), state["events"])
        self.batches.fetched = set(state["batches"]["fetched"])
        set_random_states(torch, state["start"])
        self._quiet = Quiet(self.outside.refuse, shows)
        self.files.play(state["files"])
        self.skipping.play(self._begins)

    def _seam(self, frame: FrameType) -> None:
        """The program stands where it was saved, with skeletons for tensors: it becomes the one that was saved."""
        try:
            with self.tape.unheard:
                self.skipping.stops()
                self._becomes(self.saved or {}, frame)
        except FlatoutError as error:
            self.refuse(str(error))
        except Exception as error:
            self.refuse(f"flatout made a mistake ({type(error).__name__}: {error})")
        now_s = self.outside.seconds()
        through_s, self._began_s = now_s - self._began_s, now_s
        self.saved = None
        self.outside.at_seam(through_s, self._trained_s)

    def _becomes(self, saved: dict[str, Any], frame: FrameType) -> None:
        assert self._origins is not None
        self.tape.end()
        drawn = self._draws.compare(saved["random"]) if self._draws is not None else []
        if drawn:
            self.refuse(f"the program draws random numbers itself ({' and '.join(drawn)}), in turns with what is skipped. Give its data set a "
                         f"generator of its own, or workers")
        seam, world = Seam(saved, self.skeletons, self._origins, self.refuse), World().look(frame, self._also())
        seam.compare(world, self.batches.waiting())
        self.skipping.ends()
        self.files.come_out()  # before workers are started, which would live on in the shelter
        said = self.batches.go_on(saved["batches"])
        if said:
            self.refuse("; ".join(said))
        seam.put_back(world)
        if self.collectives is not None:
            self.collectives.go_on(saved["ranks"])
        set_random_states(torch, saved["random"])
        self.files.go_on(saved["files"])
        assert self._quiet is not None
        self._quiet.ends()
        self.tape.record(Journal(self.journal, Place.from_json(saved["journal"])))
        self._trained_s = saved["trained_s"]
