"""Exact resume of one process: it records, or replays up to a checkpoint and then records again.

Both are one Listener around the checkpointing Listener (`flatout.checkpoint.rescue`). While it records, it adds each
event to the value log. To each checkpoint it adds two things: the position in the log and the state that the
script can reach. While it replays, it waits for the event at which the checkpoint was saved. At this resume
point it restores the saved state and starts to record again.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from flatout.agent.bootstrap import say_at_once
from flatout.agent.frames import is_users
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.checkpoint.environment import differences, environment
from flatout.checkpoint.journal import JournalPosition, ValueJournal, read_journal
from flatout.checkpoint.metadata import CheckpointMeta, ExactMeta
from flatout.checkpoint.random_states import random_states, set_random_states
from flatout.checkpoint.rescue import Rescue
from flatout.checkpoint.resume.choice import check, digest_of, newest
from flatout.checkpoint.resume.fake_operators import FakeOperators
from flatout.checkpoint.resume.files import Files
from flatout.checkpoint.resume.initial_tensors import InitialTensors
from flatout.checkpoint.resume.muted_io import MutedIO
from flatout.checkpoint.resume.reachable_state import ReachableState
from flatout.checkpoint.resume.replayed_loaders import ReplayedLoaders
from flatout.checkpoint.resume.resume_point import RandomDrawCheck, ResumePoint
from flatout.checkpoint.resume.saved_world import state_of_world
from flatout.checkpoint.resume.skipping import Skipping
from flatout.checkpoint.resume.users_objects import users_modules
from flatout.checkpoint.resume.value_hooks import ValueHooks
from flatout.checkpoint.resume.value_log import ValueLog
from flatout.data.streams import own_generators
from flatout.job import heartbeat
from flatout.job.claims import CHECKPOINTS, claim_or_take_over
from flatout.measure.clock import seconds
from flatout.schema.errors import CannotResume, FlatoutError, StorageError
from flatout.schema.run_request import ResumeOptions

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

COST_S = 0.02  # assumed cost of a checkpoint, if the one resumed from does not record it
JOURNAL = "journal-"
unlink = os.unlink  # the original, before flatout patches file functions
# events, in addition to those of batches
FORWARD, BACKWARD, WENT_BACKWARD, OPTIMIZER, STEPPED = 2, 3, 4, 5, 6


class ExactSession(Listener):
    """The `Checkpointing` of a program that can be resumed exactly, and the `ExactResumePart` of its checkpoints.

    ``resumed`` is called at the resume point.
    """

    def __init__(
        self,
        options: ResumeOptions,
        folder: Path,
        ledger: Ledger,
        resumed: Callable[[], None],
    ) -> None:
        self.options, self.folder, self._resumed = options, folder, resumed
        self._sources = dict[str, str]()
        self._why_not = ""
        self.next_command = "the same command" + (" without --from-scratch" if options.from_scratch else "")
        heartbeat.set_exact_resume()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.save, unfinished = (None, "") if options.from_scratch else newest(folder)
        self.meta = CheckpointMeta.from_json(self.save.manifest.metadata) if self.save is not None else None
        exact = self.meta.exact if self.meta is not None else None
        self.journal = folder / (exact.journal if exact else f"{JOURNAL}{uuid.uuid4().hex[:8]}")
        claim = os.environ["FLATOUT_JOB"] + CHECKPOINTS
        self.rescue = Rescue(
            torch,
            folder,
            say_at_once,
            lambda: claim_or_take_over(claim),
            ledger,
            exact=self,
            resumed=self.save.step if self.save is not None else None,
            cost_s=(exact.cost_s if exact is not None else 0.0) or COST_S,
        )
        atexit.register(self.rescue.finish)
        self.saved = state = self._state(unfinished)
        self.value_log = ValueLog(self.refuse, self.say)
        self.replay_tensors = FakeOperators(self.refuse)
        self.skipping = Skipping(self.value_log, self.replay_tensors, ledger)
        self.batches = ReplayedLoaders(self.value_log, ledger, self._begins, own_generators)
        self.files = Files(
            self.journal.with_name(f"{self.journal.name}.files"),
            self.value_log,
            self.refuse,
            self.resumes_itself,
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
            self._play(state)
        self.files.install()
        heartbeat.on_own_resume(self.resumes_itself)
        atexit.register(self._ended)

    def _state(self, unfinished: str) -> dict[str, Any] | None:
        """Return the state of the checkpoint; None to start from scratch.

        Refuses if the checkpoint cannot be used, or if there is none although the user insists."""
        if unfinished:
            why = f"its last start left no checkpoint to resume from: {unfinished}"
            if self.options.required:
                self.refuse(why)
            self.say(f"this program starts from scratch: {why}")
        if self.save is None or self.meta is None:
            return None
        self.say(f"replaying the program up to step {self.save.step}, from {os.path.relpath(self.save.path)}")
        try:
            check(torch, self.save, self.meta)
            state: dict[str, Any] = self.save.read(torch)["exact"]
            return state
        except FlatoutError as error:
            self.refuse(str(error).rstrip("."))

    # -- Checkpointing -----------------------------------------------------------------------------------------

    @property
    def listener(self) -> Listener:
        return self

    @property
    def replaying(self) -> bool:
        return self.saved is not None

    @property
    def active(self) -> bool:
        return self.replaying or self.rescue.active

    def begin(self, context: TrainingContext) -> None:
        self.rescue.begin(context)

    def broke(self, error: Exception) -> None:
        if self.replaying:
            self.refuse(f"internal error in flatout ({type(error).__name__}: {error})")
        self.rescue.leave()

    # -- the process -----------------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        say_at_once(sentence)

    def refuse(self, why: str) -> NoReturn:
        """Exit the process, whatever the program catches: it must not run with tensors that have no values."""
        then = "`flatout rescue` lists the checkpoints; `flatout run --resume --from-scratch` starts from scratch"
        if not self.options.required:
            unlink(self.journal)
            then = "The next start begins from scratch; `flatout rescue` lists the checkpoints"
        say_at_once(f"cannot resume exactly: {why}. {then}.")
        os._exit(CannotResume.exit_code)

    def recording_begins(self) -> None:
        """Delete journals of runs that can no longer be resumed, and the files next to them.

        Files that this run wrote before its training are next to its own journal; they stay."""
        for path in self.folder.glob(f"{JOURNAL}*"):
            if path.name.startswith(self.journal.name):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def at_resume_point(self, through_s: float, trained_s: float) -> None:
        assert self.save is not None
        assert self.meta is not None
        differs = differences(self.meta.surroundings, environment(torch))
        if differs:  # the program has made its own settings by now
            self.refuse(f"the environment differs from that of {self.save.path.name}: {'; '.join(differs)}")
        self.say(
            f"resumed exactly after step {self.save.step}, reached in {through_s:.1f} s; training had taken {trained_s:.1f} s"
        )
        heartbeat.mark_resume_point()
        self._resumed()

    def resumes_itself(self, path: str) -> None:
        """Stop recording; no checkpoint is used to resume."""
        if self.replaying or self.value_log.broken:
            return
        self.value_log.breaks(f"it resumes by itself, from {os.path.relpath(path)}")
        self.journal.unlink(missing_ok=True)
        self.say(
            f"this script resumes by itself, from {os.path.relpath(path)}; flatout leaves this to the script"
        )
        heartbeat.set_exact_resume(False)
        heartbeat.checkpoint_written()  # counts the file from which the program resumes itself
        if not self.options.rescue:
            self.rescue.leave()

    # -- ExactResumePart ---------------------------------------------------------------------------------------

    def extra_state(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        state, why_not = self._extra_state(frame)
        if why_not and why_not != self._why_not and not self.value_log.broken:
            say_at_once(f"from here on this program could not be resumed exactly: {why_not}")
        self._why_not = why_not
        return state, why_not

    def metadata(self, why_not: str, cost_s: float) -> ExactMeta:
        for module in users_modules():
            file = os.path.abspath(getattr(module, "__file__", None) or "")
            if file not in self._sources and is_users(file):
                # at first sight: later edits do not affect the running program
                self._sources[file] = digest_of(file)
        return ExactMeta(self.journal.name, tuple(sys.orig_argv[1:]), dict(self._sources), why_not, cost_s)

    def kept(self, step: int) -> None:
        if not self._why_not and not self.value_log.broken:
            heartbeat.checkpoint_written(step)

    # -- the end -----------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        """Delete the journal at the end of the program, unless it failed or got a signal: such a run can be resumed."""
        if os.getpid() != self.pid:
            return
        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self.replaying:
            how = (
                f"failed with {type(failure).__name__}: {failure}{_place_of(failure)}"
                if failure is not None
                else "exited"
            )
            self.refuse(f"before the program reached its resume point, it {how}")
        if failure is None and not self.rescue.signalled:
            self.journal.unlink(missing_ok=True)
            self.files.ended()

    def observe(self) -> None:
        """Install the hooks; they stay until the ledger is restored."""
        self.observing.install()
        self.skipping.install()

    def install(self) -> None:
        """Patch the DataLoaders. Call it after everything else that changes how loaders are made."""
        self.batches.install()

    def _forked(self) -> None:
        self.value_log.paused += 1

    # -- recording ------------------------------------------------------------------------------------------

    def _extra_state(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
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
            self._passes_on(self.rescue.forward_begin, root, args, kwargs)
        self._call = None

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self._begins()
        if self._event(BACKWARD):
            self._passes_on(self.rescue.backward_begin, losses)

    def backward_end(self) -> None:
        if self._event(WENT_BACKWARD):
            self._passes_on(self.rescue.backward_end)

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        if self._event(OPTIMIZER):
            self._passes_on(self.rescue.optimizer_begin, optimizer)

    def optimizer_end(self, optimizer: Optimizer) -> None:
        if self._event(STEPPED):
            self._passes_on(self.rescue.optimizer_end, optimizer)

    def step_end(self) -> None:
        if self.value_log.observes:
            self.value_log.mark()
        if not self.value_log.going:
            self._passes_on(self.rescue.step_end)

    def _passes_on(self, event: Callable[..., None], *about: object) -> None:
        """Call the checkpointing listener, unrecorded."""
        with self.value_log.unrecorded:
            event(*about)

    # -- replaying ------------------------------------------------------------------------------------------

    def _play(self, state: dict[str, Any]) -> None:
        self.value_log.play(
            read_journal(self.journal, JournalPosition.from_json(state["journal"])), state["events"]
        )
        self.batches.fetched = set(state["batches"]["fetched"])
        set_random_states(torch, state["start"])
        self._quiet = MutedIO(self.refuse, self.options.shows)
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


def _place_of(failure: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if is_users(frame.filename)]
    return f", at {os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
