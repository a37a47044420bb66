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
from types import FrameType
from typing import TYPE_CHECKING, Any

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
from flatout.checkpoint.resume.replay_host import ReplayHost, ResumeRequest
from flatout.checkpoint.resume.replayed_loaders import ReplayedLoaders
from flatout.checkpoint.resume.resume_point import RandomDrawCheck, ResumePoint
from flatout.checkpoint.resume.sample_orders import SampleOrders
from flatout.checkpoint.resume.saved_world import state_of_world
from flatout.checkpoint.resume.skipping import Skipping
from flatout.checkpoint.resume.value_hooks import ValueHooks
from flatout.checkpoint.resume.value_log import ValueLog
from flatout.checkpoint.worker_state import Find
from flatout.job import heartbeat
from flatout.schema.errors import FlatoutError, StorageError

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.checkpoint.resume.collectives import Collectives

# events, in addition to those of batches
FORWARD, BACKWARD, WENT_BACKWARD, OPTIMIZER, STEPPED = 2, 3, 4, 5, 6


class ScriptReplay(Listener):
    """Records or replays one script.

    ``saving`` is the checkpointing listener; it gets no events before the resume point. ``find`` returns the
    random generators that an object holds.
    """

    def __init__(
        self, request: ResumeRequest, host: ReplayHost, saving: Listener, ledger: Ledger, find: Find
    ) -> None:
        state = request.state
        self.refuse, self.host = host.diverged, host
        self.journal, self.saved, self.saving, self.ledger = request.journal, state, saving, ledger
        self.value_log = ValueLog(self.refuse, host.say)
        self.replay_tensors = FakeOperators(self.refuse)
        self.skipping = Skipping(self.value_log, self.replay_tensors, ledger)
        self.batches = ReplayedLoaders(self.value_log, ledger, self._begins, find)
        self.batches.fetches = request.fetches
        self.files = Files(
            request.journal.with_name(f"{request.journal.name}.files"),
            self.value_log,
            host.refuse,
            self._resumes_by_itself,
        )
        heartbeat.on_own_resume(self._resumes_by_itself)
        self.collectives: Collectives | None = None
        if request.several:
            from flatout.checkpoint.resume.collectives import Collectives

            self.collectives = Collectives(self.value_log, self.replay_tensors, ledger)
        self._quiet: MutedIO | None = None
        self._origins: InitialTensors | None = None
        self._draws: RandomDrawCheck | None = None
        self._call: Any = None
        # root modules, in the order of their first calls
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbered = 0
        self._began_s = self._trained_s = 0.0  # start of training or resume; training time before it
        self.pid = os.getpid()
        self.drawn = SampleOrders(self.value_log, ledger)
        self.observing = ValueHooks(
            self.value_log, ledger, self.replay_tensors.gradient_sources.comes_from, self.drawn.taken
        )
        self.replay_tensors.shaped_again, self.replay_tensors.taken = (
            self.observing.shaped_again,
            self.drawn.taken,
        )
        self.observe()
        os.register_at_fork(after_in_child=self._forked)
        if state is None:
            self._start = random_states(torch)
            self.files.looks()
        else:
            self._start = state["start"]
            self._play(state, request.shows)
        self.files.install()

    def observe(self) -> None:
        """Install the hooks; they stay until the ledger is restored."""
        for each in (self.drawn, self.observing, self.skipping):
            each.install()

    def install(self) -> None:
        """Patch the DataLoaders. Call it after everything else that changes how loaders are made."""
        self.batches.install()

    @property
    def going(self) -> bool:
        return self.value_log.going

    @property
    def skips(self) -> bool:
        """Whether a replay runs and has skipped a data set of this process, which may count its accesses."""
        return self.saved is not None and bool(self.batches.skipped)

    def _forked(self) -> None:
        self.value_log.deaf += 1

    def broke(self, error: Exception) -> None:
        if self.value_log.going:
            self.refuse(f"internal error in flatout ({type(error).__name__}: {error})")

    def ended(self) -> None:
        """The script has finished: there is nothing left to resume."""
        self.journal.unlink(missing_ok=True)
        self.files.ended()

    def _resumes_by_itself(self, place: str) -> None:
        """Stop recording; no checkpoint is used to resume."""
        if not self.value_log.going and not self.value_log.broken:
            self.value_log.breaks(f"it resumes by itself, from {os.path.relpath(place)}")
            self.journal.unlink(missing_ok=True)
            self.host.left_alone(
                f"this script resumes by itself, from {os.path.relpath(place)}; flatout leaves this to the script"
            )

    # -- recording ------------------------------------------------------------------------------------------

    def beside(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        """Return what a checkpoint needs to resume from this event, and why it would be unusable, or ""."""
        value_log = self.value_log
        if value_log.deaf > 1:  # one of them is for the checkpointing listener
            return {}, "its steps end inside a backward pass, where nothing is recorded"
        place = value_log.write()
        if place is None or self._origins is None:
            return {}, value_log.broken or "its training has not begun"
        world = ReachableState().look(frame, self._also())
        state, unsound = state_of_world(world, self._origins)
        unsound += self.files.unsound()
        if self.collectives is not None:
            unsound += self.collectives.unsound()
            state["ranks"] = self.collectives.place()
        return {
            **state,
            "start": self._start,
            "random": random_states(torch),
            "batches": self.batches.place(),
            "files": self.files.state(),
            "journal": place.to_json(),
            "trained_s": self._trained_s + self.host.seconds() - self._began_s,
            "events": value_log.events,
            "steps": value_log.steps,
        }, "; ".join(unsound)

    def met(self) -> dict[str, Any]:
        """Return the collective counts, which are equal in all ranks' checkpoints of one moment."""
        return self.collectives.met() if self.collectives is not None else {}

    def flush(self) -> None:
        """Wait until the journal is on the disk."""
        if self.value_log.journal is not None:
            self.value_log.journal.flush()

    def _also(self) -> dict[str, Any]:
        return {"call": self._call, **self.drawn.held(), **self.batches.held()}

    def _begins(self) -> None:
        """Start the training at the first batch or module call; everything before it was really executed."""
        if self._origins is None:
            self.value_log.began, self._began_s = True, self.host.seconds()
            self.files.begins()
            if self.collectives is not None:
                self.collectives.begins()
            with self.value_log.unheard:
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
        self.host.begins()
        try:
            self.value_log.record(ValueJournal(self.journal))
        except StorageError as error:
            self.value_log.breaks(str(error))
            self.host.say(f"this script cannot be resumed exactly: {error}")

    @contextmanager
    def for_real(self) -> Iterator[None]:
        """Run flatout's own code: it acts on real tensors and is not recorded."""
        with self.skipping.paused(), self.value_log.unheard:
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
        with self.value_log.unheard:
            event(*about)

    # -- replaying ------------------------------------------------------------------------------------------

    def _play(self, state: dict[str, Any], shows: bool) -> None:
        self.value_log.play(
            read_journal(self.journal, JournalPosition.from_json(state["journal"])), state["events"]
        )
        self.batches.fetched = set(state["batches"]["fetched"])
        set_random_states(torch, state["start"])
        self._quiet = MutedIO(self.host.refuse, shows)
        self.files.play(state["files"])
        self.skipping.play(self._begins)

    def _resume_point(self, frame: FrameType) -> None:
        """Restore the saved state: the script is at the resume point, with fake tensors."""
        try:
            with self.value_log.unheard:
                self.skipping.stops()
                self._becomes(self.saved or {}, frame)
        except FlatoutError as error:
            self.refuse(str(error))
        except Exception as error:
            self.refuse(f"internal error in flatout ({type(error).__name__}: {error})")
        now_s = self.host.seconds()
        through_s, self._began_s = now_s - self._began_s, now_s
        self.saved = None
        self.host.at_resume_point(through_s, self._trained_s)

    def _becomes(self, saved: dict[str, Any], frame: FrameType) -> None:
        assert self._origins is not None
        self.value_log.end()
        drawn = self._draws.compare(saved["random"]) if self._draws is not None else []
        if drawn:
            self.refuse(
                f"both the script and its skipped data loading draw from {' and '.join(drawn)}. Give the data set a random "
                f"generator of its own, or use loader workers"
            )
        resume_point, world = (
            ResumePoint(saved, self.replay_tensors, self._origins, self.refuse),
            ReachableState().look(frame, self._also()),
        )
        resume_point.compare(world, self.batches.waiting())
        self.skipping.ends()
        self.files.come_out()  # before workers start: they would stay in the file sandbox
        said = self.batches.go_on(saved["batches"])
        if said:
            self.refuse("; ".join(said))
        resume_point.put_back(world)
        if self.collectives is not None:
            self.collectives.go_on(saved["ranks"])
        set_random_states(torch, saved["random"])
        self.files.go_on(saved["files"])
        assert self._quiet is not None
        self._quiet.ends()
        self.value_log.record(ValueJournal(self.journal, JournalPosition.from_json(saved["journal"])))
        self._trained_s = saved["trained_s"]
