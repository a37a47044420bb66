"""Records a script so that it can be resumed exactly, and replays it up to a checkpoint when it starts again.

Both are one Listener around the checkpointing Listener (`flatout.checkpoint.rescue`). While it records, it adds each
event to the value log. To each checkpoint it adds two things: the position in the log and the state that the
script can reach. While it replays, it waits for the event at which the checkpoint was saved. At this resume
point it restores the saved state and starts to record again.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.checkpoint.journal import JournalPosition, ValueJournal, read_journal
from flatout.checkpoint.random_states import random_states, set_random_states
from flatout.checkpoint.resume.fake_operators import FakeOperators
from flatout.checkpoint.resume.files import Files
from flatout.checkpoint.resume.initial_tensors import InitialTensors
from flatout.checkpoint.resume.muted_io import MutedIO
from flatout.checkpoint.resume.reachable_state import ReachableState
from flatout.checkpoint.resume.replayed_loaders import ReplayedLoaders
from flatout.checkpoint.resume.resume_point import RandomDrawCheck, ResumePoint
from flatout.checkpoint.resume.saved_world import state_of_world
from flatout.checkpoint.resume.skipping import Skipping
from flatout.checkpoint.resume.value_hooks import ValueHooks
from flatout.checkpoint.resume.value_log import ValueLog
from flatout.data.streams import own_generators
from flatout.measure.clock import seconds
from flatout.schema.errors import FlatoutError, StorageError

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

# events, in addition to those of batches
FORWARD, BACKWARD, WENT_BACKWARD, OPTIMIZER, STEPPED = 2, 3, 4, 5, 6


class ScriptReplay(Listener):
    """Records or replays one script.

    ``journal``: path of the journal. ``state``: what `extra_state` added to the checkpoint to resume from; None to
    start from scratch. ``saving``: the checkpointing listener; it gets no events before the resume point. ``shows``:
    output is shown during the replay.
    """

    def __init__(
        self, journal: Path, state: dict[str, Any] | None, saving: Listener, ledger: Ledger, shows: bool
    ) -> None:
        self.journal, self.saved, self.saving, self.ledger = journal, state, saving, ledger
        self.value_log = ValueLog(self.refuse, self.say)
        self.replay_tensors = FakeOperators(self.refuse)
        self.skipping = Skipping(self.value_log, self.replay_tensors, ledger)
        self.batches = ReplayedLoaders(self.value_log, ledger, self._begins, own_generators)
        self.files = Files(
            journal.with_name(f"{journal.name}.files"), self.value_log, self.refuse, self.resumes_itself
        )
        self._quiet: MutedIO | None = None
        self._origins: InitialTensors | None = None
        self._draws: RandomDrawCheck | None = None
        self._call: Any = None
        # root modules, in the order of their first calls
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbered = 0
        self._began_s = self._trained_s = 0.0  # start of training or resume; training time before it
        self.pid = os.getpid()
        self.observing = ValueHooks(self.value_log, ledger)
        self.replay_tensors.shaped_again = self.observing.shaped_again
        self.observe()
        os.register_at_fork(after_in_child=self._forked)
        if state is None:
            self._start = random_states(torch)
            self.files.look()
        else:
            self._start = state["start"]
            self._play(state, shows)
        self.files.install()

    def observe(self) -> None:
        """Install the hooks; they stay until the ledger is restored."""
        self.observing.install()
        self.skipping.install()

    def install(self) -> None:
        """Patch the DataLoaders. Call it after everything else that changes how loaders are made."""
        self.batches.install()

    def _forked(self) -> None:
        self.value_log.paused += 1

    # -- the process, which `ExactSession` represents ---------------------------------------------------------

    def say(self, sentence: str) -> None:
        """Inform the user."""
        raise NotImplementedError

    def refuse(self, why: str) -> NoReturn:
        """End the process with an error."""
        raise NotImplementedError

    def recording_begins(self) -> None:
        """Called before anything is written."""
        raise NotImplementedError

    def at_resume_point(self, through_s: float, trained_s: float) -> None:
        """Called when the saved state is restored.

        ``through_s``: seconds of the replay; ``trained_s``: seconds of training that the first run took to here.
        """
        raise NotImplementedError

    def resumes_itself(self, path: str) -> None:
        """Called where the script resumes by itself, from this file or folder."""
        raise NotImplementedError

    # -- recording ------------------------------------------------------------------------------------------

    def extra_state(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        """Return what a checkpoint needs to resume from this event, and why it would be unusable, or ""."""
        value_log = self.value_log
        if value_log.paused > 1:  # one of them is for the checkpointing listener
            return {}, "its steps end inside a backward pass, where nothing is recorded"
        position = value_log.write()
        if position is None or self._origins is None:
            return {}, value_log.broken or "its training has not begun"
        state, unsound = state_of_world(self._world(frame), self._origins)
        unsound += self.files.unsound()
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            unsound.append("it runs as several ranks")
        return {
            **state,
            "start": self._start,
            "random": random_states(torch),
            "batches": self.batches.place(),
            "files": self.files.state(),
            "journal": position.to_json(),
            "trained_s": self._trained_s + seconds() - self._began_s,
            "events": value_log.events,
            "steps": value_log.steps,
        }, "; ".join(unsound)

    def flush(self) -> None:
        """Wait until the journal is on the disk."""
        if self.value_log.journal is not None:
            self.value_log.journal.flush()

    def _world(self, frame: FrameType | None) -> ReachableState:
        return ReachableState().look(frame, {"call": self._call, **self.batches.held()})

    def _begins(self) -> None:
        """Start the training at the first batch or module call; everything before it was really executed."""
        if self._origins is None:
            self.value_log.began, self._began_s = True, seconds()
            self.files.training_begins()
            with self.value_log.unrecorded:
                self._origins = InitialTensors(
                    ReachableState().look(sys._getframe(1), {}), everything=self.value_log.going
                )
            if self.value_log.going:
                self._draws = RandomDrawCheck()
                self.skipping.starts()
            elif not self.value_log.broken:
                self._record_from_here()

    def _record_from_here(self) -> None:
        """Record from here on, with the values so far. Processes that do not train never reach this."""
        self.recording_begins()
        try:
            self.value_log.record(ValueJournal(self.journal))
        except StorageError as error:
            self.value_log.breaks(str(error))
            self.say(f"this script cannot be resumed exactly: {error}")

    @contextmanager
    def for_real(self) -> Iterator[None]:
        """Run flatout's own code: it acts on real tensors and is not recorded."""
        with self.skipping.paused(), self.value_log.unrecorded:
            yield

    # -- events ---------------------------------------------------------------------------------------------

    def _event(self, what: int) -> bool:
        """Log an event; return whether the checkpointing listener gets it."""
        if not self.value_log.observes:  # e.g. inside a backward pass
            return not self.value_log.going
        if self.value_log.event(what):
            self._resume_point(sys._getframe(2))
            return True
        return not self.value_log.going

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begins()
        self._call = root, args, kwargs
        if root not in self._numbers:
            self._numbers[root] = self._numbered
            self._numbered += 1
        if self._event(FORWARD + 16 * self._numbers[root]):
            self._passes_on(self.saving.forward_begin, root, args, kwargs)
        self._call = None

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self._begins()
        if self._event(BACKWARD):
            self._passes_on(self.saving.backward_begin, losses)

    def backward_end(self) -> None:
        if self._event(WENT_BACKWARD):
            self._passes_on(self.saving.backward_end)

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        if self._event(OPTIMIZER):
            self._passes_on(self.saving.optimizer_begin, optimizer)

    def optimizer_end(self, optimizer: Optimizer) -> None:
        if self._event(STEPPED):
            self._passes_on(self.saving.optimizer_end, optimizer)

    def step_end(self) -> None:
        if self.value_log.observes:
            self.value_log.mark()
        if not self.value_log.going:
            self._passes_on(self.saving.step_end)

    def _passes_on(self, event: Callable[..., None], *about: object) -> None:
        """Call the checkpointing listener, unrecorded."""
        with self.value_log.unrecorded:
            event(*about)

    # -- replaying ------------------------------------------------------------------------------------------

    def _play(self, state: dict[str, Any], shows: bool) -> None:
        self.value_log.play(
            read_journal(self.journal, JournalPosition.from_json(state["journal"])), state["events"]
        )
        self.batches.fetched = set(state["batches"]["fetched"])
        set_random_states(torch, state["start"])
        self._quiet = MutedIO(self.refuse, shows)
        self.files.play(state["files"])
        self.skipping.play(self._begins)

    def _resume_point(self, frame: FrameType) -> None:
        """Restore the saved state: the script is at the resume point, with fake tensors."""
        try:
            with self.value_log.unrecorded:
                self.skipping.stops()
                self._restore(self.saved or {}, frame)
        except FlatoutError as error:
            self.refuse(str(error))
        except Exception as error:
            self.refuse(f"internal error in flatout ({type(error).__name__}: {error})")
        now_s = seconds()
        through_s, self._began_s = now_s - self._began_s, now_s
        self.saved = None
        self.at_resume_point(through_s, self._trained_s)

    def _restore(self, saved: dict[str, Any], frame: FrameType) -> None:
        assert self._origins is not None
        assert self._draws is not None
        assert self._quiet is not None
        self.value_log.end()
        if drawn := self._draws.compare(saved["random"]):
            self.refuse(
                f"both the script and its skipped data loading draw from {' and '.join(drawn)}. Give the data set a random "
                f"generator of its own, or use loader workers"
            )
        resume_point = ResumePoint(saved, self.replay_tensors, self._origins, self.refuse)
        world = self._world(frame)
        resume_point.compare(world, self.batches.waiting())
        self.skipping.ends()
        self.files.come_out()  # before workers start: they would stay in the file sandbox
        self.batches.go_on(saved["batches"])
        resume_point.put_back(world)
        set_random_states(torch, saved["random"])
        self.files.go_on(saved["files"])
        self._quiet.ends()
        self.value_log.record(ValueJournal(self.journal, JournalPosition.from_json(saved["journal"])))
        self._trained_s = saved["trained_s"]
