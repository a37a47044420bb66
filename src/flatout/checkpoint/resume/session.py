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

from flatout.agent.bootstrap import notify_unbuffered
from flatout.agent.frames import is_user_file, user_sources
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.checkpoint.metadata import (
    CheckpointMeta,
    ExactMeta,
    check_surroundings,
    differences,
    environment,
    newest_resumable,
)
from flatout.checkpoint.random_states import random_states, set_random_states
from flatout.checkpoint.rescue import Rescue
from flatout.checkpoint.resume.fake_operators import FakeOperators
from flatout.checkpoint.resume.files import Files
from flatout.checkpoint.resume.reachable_state import ReachableState
from flatout.checkpoint.resume.replayed_loaders import ReplayedLoaders
from flatout.checkpoint.resume.resume_point import (
    InitialTensors,
    RandomDrawCheck,
    ResumePoint,
    program_state,
)
from flatout.checkpoint.resume.training_skipper import TrainingSkipper
from flatout.checkpoint.resume.value_hooks import ValueHooks
from flatout.checkpoint.resume.value_log import (
    JournalPosition,
    ValueJournal,
    ValueLog,
    is_written,
    read_journal,
)
from flatout.data.streams import own_generators
from flatout.job import heartbeat
from flatout.job.claims import CHECKPOINTS, claim_or_take_over
from flatout.job.trust import file_digest
from flatout.measure.clock import seconds
from flatout.schema.errors import CannotResume, FlatoutError, StorageError
from flatout.schema.run_request import ResumeOptions

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


# Suppresses output and blocks network connections during a replay.
#
# The script must not repeat what it has done outside itself, and must not get new answers from the network.

LOCAL_ADDRESSES = ("127.", "::1", "localhost")


class MutedIO:
    """Mutes output until `stop`.

    ``show_output``: output is shown again. ``refuse`` is called when the script connects to another machine; it
    does not return."""

    def __init__(self, refuse: Callable[[str], NoReturn], show_output: bool) -> None:
        self.refuse, self.muted = refuse, True
        self._ledger = Ledger()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not show_output:
                self._ledger.set(stream, "write", self._wrap_stream(stream.write), new=True)
        if not show_output:
            self._ledger.set(os, "write", self._wrap_os_write(os.write))
        sockets = sys.modules.get("socket")
        if sockets is not None:
            self._ledger.set(sockets.socket, "connect", self._wrap_connect(sockets.socket.connect))

    def stop(self) -> None:
        self.muted = False  # for code that holds a patched function
        self._ledger.restore()

    def _wrap_stream(self, write: Callable[[str], int]) -> Callable[[str], int]:
        return lambda text: len(text) if self.muted else write(text)

    def _wrap_os_write(self, write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def written(handle: int, data: Any) -> int:
            silent = self.muted and handle in (1, 2) and is_user_file(sys._getframe(1).f_code.co_filename)
            return len(data) if silent else write(handle, data)

        return written

    def _wrap_connect(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        def connect_here(socket: object, address: object) -> Any:
            if self.muted and isinstance(address, tuple) and not str(address[0]).startswith(LOCAL_ADDRESSES):
                self.refuse(
                    f"the script connects to {address[0]} over the network, and the answer may differ from the first run"
                )
            return connect(socket, address)

        return connect_here


COST_S = 0.02  # assumed cost of a checkpoint, if the one resumed from does not record it
JOURNAL = "journal-"
unlink = os.unlink  # the original, before flatout patches file functions
# events, in addition to those of batches
FORWARD, BACKWARD, BACKWARD_END, OPTIMIZER, OPTIMIZER_END = 2, 3, 4, 5, 6


class ExactSession(Listener):
    """The `Checkpointing` of a program that can be resumed exactly, and the `ExactResumePart` of its checkpoints.

    ``resumed`` is called at the resume point."""

    def __init__(
        self, options: ResumeOptions, folder: Path, ledger: Ledger, resumed: Callable[[], None]
    ) -> None:
        self.options, self.folder, self._resumed = options, folder, resumed
        self._sources = dict[str, str]()
        self._why_not = ""
        self.next_command = "the same command" + (" without --from-scratch" if options.from_scratch else "")
        heartbeat.set_exact_resume()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.checkpoint, unfinished = (None, "") if options.from_scratch else newest_resumable(folder)
        self.meta, exact, step = CheckpointMeta(), None, None
        if self.checkpoint is not None:
            self.meta = CheckpointMeta.from_json(self.checkpoint.manifest.metadata)
            exact, step = self.meta.exact, self.checkpoint.step
        self.journal = folder / (exact.journal if exact else f"{JOURNAL}{uuid.uuid4().hex[:8]}")
        claim = os.environ["FLATOUT_JOB"] + CHECKPOINTS
        self.rescue = Rescue(
            torch,
            folder,
            notify_unbuffered,
            lambda: claim_or_take_over(claim),
            ledger,
            exact=self,
            resumed=step,
            cost_s=(exact.cost_s if exact is not None else 0.0) or COST_S,
        )
        atexit.register(self.rescue.finish)
        self.saved = state = self._state(unfinished)
        self.value_log = ValueLog(self.refuse, notify_unbuffered)
        self.fake_operators = FakeOperators(self.refuse)
        self.skipper = TrainingSkipper(self.value_log, self.fake_operators, ledger)
        self.batches = ReplayedLoaders(self.value_log, ledger, self._start_training, own_generators)
        self.files = Files(
            self.journal.with_name(f"{self.journal.name}.files"),
            self.value_log,
            self.refuse,
            self.on_own_checkpoint,
        )
        self._muted_io: MutedIO | None = None
        self._initial: InitialTensors | None = None
        self._draws: RandomDrawCheck | None = None
        self._call: Any = None
        # root modules, in the order of their first calls
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbered = 0
        self._began_s = self._trained_s = 0.0  # start of training or resume; training time before it
        self.pid = os.getpid()
        self.value_hooks = ValueHooks(self.value_log, ledger)
        self.fake_operators.make_recorded_result = self.value_hooks.make_recorded_result
        self.observe()
        os.register_at_fork(after_in_child=self._forked)
        if state is None:
            self._start = random_states(torch)
            self.files.observe_checks()
        else:
            self._start = state["start"]
            self._replay(state)
        self.files.install()
        heartbeat.on_own_resume(self.on_own_checkpoint)
        atexit.register(self._ended)

    def _state(self, unfinished: str) -> dict[str, Any] | None:
        """Return the state of the checkpoint; None to start from scratch.

        Refuses if the checkpoint cannot be used, or if there is none although the user insists."""
        if unfinished:
            why = f"its last start left no checkpoint to resume from: {unfinished}"
            if self.options.required:
                self.refuse(why)
            notify_unbuffered(f"this program starts from scratch: {why}")
        if self.checkpoint is None:
            return None
        notify_unbuffered(
            f"replaying the program up to step {self.checkpoint.step}, from {os.path.relpath(self.checkpoint.path)}"
        )
        try:
            check_surroundings(torch, self.checkpoint, self.meta)
            state: dict[str, Any] = self.checkpoint.read(torch)["exact"]
            return state
        except FlatoutError as error:
            self.refuse(str(error).rstrip("."))

    # -- Checkpointing

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

    def on_error(self, error: Exception) -> None:
        if self.replaying:
            self.refuse(f"internal error in flatout ({type(error).__name__}: {error})")
        self.rescue.stop()

    # -- the process

    def refuse(self, why: str) -> NoReturn:
        """Exit the process, whatever the program catches: it must not run with tensors that have no values."""
        advice = "`flatout rescue` lists the checkpoints; `flatout run --resume --from-scratch` starts from scratch"
        if not self.options.required:
            unlink(self.journal)
            advice = "The next start begins from scratch; `flatout rescue` lists the checkpoints"
        notify_unbuffered(f"cannot resume exactly: {why}. {advice}.")
        os._exit(CannotResume.exit_code)

    def recording_begins(self) -> None:
        """Delete journals of runs that can no longer be resumed, and the files next to them.

        Files that this run wrote before its training are next to its own journal; they stay, as do those of a
        run of the same command that still lives."""
        for path in self.folder.glob(f"{JOURNAL}*"):
            if path.name.startswith(self.journal.name) or is_written(path.with_suffix("")):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def at_resume_point(self, replay_s: float, trained_s: float) -> None:
        assert self.checkpoint is not None
        differs = differences(self.meta.surroundings, environment(torch))
        if differs:  # the program has made its own settings by now
            self.refuse(
                f"the environment differs from that of {self.checkpoint.path.name}: {'; '.join(differs)}"
            )
        notify_unbuffered(
            f"resumed exactly after step {self.checkpoint.step}, reached in {replay_s:.1f} s; training had taken {trained_s:.1f} s"
        )
        heartbeat.mark_resume_point()
        self._resumed()

    def on_own_checkpoint(self, path: str) -> None:
        """Stop recording; no checkpoint is used to resume."""
        if self.replaying or self.value_log.why_stopped:
            return
        self.value_log.stop_recording(f"it resumes by itself, from {os.path.relpath(path)}")
        self.journal.unlink(missing_ok=True)
        notify_unbuffered(
            f"this script resumes by itself, from {os.path.relpath(path)}; flatout leaves this to the script"
        )
        heartbeat.set_exact_resume(False)
        heartbeat.checkpoint_written()  # counts the file from which the program resumes itself
        if not self.options.rescue:
            self.rescue.stop()

    # -- ExactResumePart

    def extra_state(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        state, why_not = self._extra_state(frame)
        if why_not and why_not != self._why_not and not self.value_log.why_stopped:
            notify_unbuffered(f"from here on this program could not be resumed exactly: {why_not}")
        self._why_not = why_not
        return state, why_not

    def metadata(self, why_not: str, cost_s: float) -> ExactMeta:
        # at first sight: later edits do not affect the running program
        self._sources |= {file: file_digest(file) for file in user_sources() if file not in self._sources}
        return ExactMeta(self.journal.name, tuple(sys.orig_argv[1:]), dict(self._sources), why_not, cost_s)

    def on_verified(self, step: int) -> None:
        if not self._why_not and not self.value_log.why_stopped:
            heartbeat.checkpoint_written(step)

    # -- the end

    def _ended(self) -> None:
        """Delete the journal at the end of the program, unless it failed or got a signal: such a run can be resumed."""
        if os.getpid() != self.pid:
            return
        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self.replaying:
            how = "exited"
            if failure is not None:
                how = f"failed with {type(failure).__name__}: {failure}{_place_of(failure)}"
            self.refuse(f"before the program reached its resume point, it {how}")
        if failure is None and not self.rescue.signalled:
            self.journal.unlink(missing_ok=True)
            self.files.delete()

    def observe(self) -> None:
        """Install the hooks; they stay until the ledger is restored."""
        self.value_hooks.install()
        self.skipper.install()

    def install(self) -> None:
        """Patch the DataLoaders. Call it after everything else that changes how loaders are made."""
        self.batches.install()

    def _forked(self) -> None:
        self.value_log.paused += 1

    # -- recording

    def _extra_state(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        value_log = self.value_log
        if value_log.paused > 1:  # one of them is for the checkpointing listener
            return {}, "its steps end inside a backward pass, where nothing is recorded"
        position = value_log.write()
        if position is None or self._initial is None:
            return {}, value_log.why_stopped or "its training has not begun"
        state, reasons = program_state(self._reachable(frame), self._initial)
        reasons += self.files.why_inexact()
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            reasons.append("it runs as several ranks")
        return {
            **state,
            "start": self._start,
            "random": random_states(torch),
            "batches": self.batches.place(),
            "files": self.files.state(),
            "journal": position.to_json(),
            "trained_s": self._trained_s + seconds() - self._began_s,
            "event_count": value_log.event_count,
            "steps": value_log.steps,
        }, "; ".join(reasons)

    def flush(self) -> None:
        """Wait until the journal is on the disk."""
        if self.value_log.journal is not None:
            self.value_log.journal.flush()

    def _reachable(self, frame: FrameType | None) -> ReachableState:
        return ReachableState().collect(frame, {"call": self._call, **self.batches.generator_variables()})

    def _start_training(self) -> None:
        if self._initial is None:
            self.value_log.training_began, self._began_s = True, seconds()
            self.files.stop_observing_checks()
            with self.value_log.unrecorded:
                self._initial = InitialTensors(
                    ReachableState().collect(sys._getframe(1), {}), everything=self.value_log.replaying
                )
            if self.value_log.replaying:
                self._draws = RandomDrawCheck()
                self.skipper.start()
            elif not self.value_log.why_stopped:
                self._record_from_here()

    def _record_from_here(self) -> None:
        self.recording_begins()
        try:
            self.value_log.record(ValueJournal(self.journal))
        except StorageError as error:
            self.value_log.stop_recording(str(error))
            notify_unbuffered(f"this script cannot be resumed exactly: {error}")

    @contextmanager
    def real_execution(self) -> Iterator[None]:
        """Run flatout's own code: it acts on real tensors and is not recorded."""
        with self.skipper.paused(), self.value_log.unrecorded:
            yield

    # -- events

    def _event(self, what: int) -> bool:
        if not self.value_log.observes:  # e.g. inside a backward pass
            return not self.value_log.replaying
        if self.value_log.event(what):
            self._resume_point(sys._getframe(2))
            return True
        return not self.value_log.replaying

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._start_training()
        self._call = root, args, kwargs
        if root not in self._numbers:
            self._numbers[root] = self._numbered
            self._numbered += 1
        if self._event(FORWARD + 16 * self._numbers[root]):
            self._forward_event(self.rescue.forward_begin, root, args, kwargs)
        self._call = None

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self._start_training()
        if self._event(BACKWARD):
            self._forward_event(self.rescue.backward_begin, losses)

    def backward_end(self) -> None:
        if self._event(BACKWARD_END):
            self._forward_event(self.rescue.backward_end)

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        if self._event(OPTIMIZER):
            self._forward_event(self.rescue.optimizer_begin, optimizer)

    def optimizer_end(self, optimizer: Optimizer) -> None:
        if self._event(OPTIMIZER_END):
            self._forward_event(self.rescue.optimizer_end, optimizer)

    def step_end(self) -> None:
        if self.value_log.observes:
            self.value_log.mark()
        if not self.value_log.replaying:
            self._forward_event(self.rescue.step_end)

    def _forward_event(self, event: Callable[..., None], *args: object) -> None:
        with self.value_log.unrecorded:
            event(*args)

    # -- replaying

    def _replay(self, state: dict[str, Any]) -> None:
        self.value_log.replay(
            read_journal(self.journal, JournalPosition.from_json(state["journal"])), state["event_count"]
        )
        self.batches.reloaded = set(state["batches"]["reloaded"])
        set_random_states(torch, state["start"])
        self._muted_io = MutedIO(self.refuse, self.options.show_output)
        self.files.replay(state["files"])
        self.skipper.replay(self._start_training)

    def _resume_point(self, frame: FrameType) -> None:
        try:
            with self.value_log.unrecorded:
                self.skipper.stop()
                self._restore(self.saved or {}, frame)
        except FlatoutError as error:
            self.refuse(str(error))
        except Exception as error:
            self.refuse(f"internal error in flatout ({type(error).__name__}: {error})")
        now_s = seconds()
        replay_s, self._began_s = now_s - self._began_s, now_s
        self.saved = None
        self.at_resume_point(replay_s, self._trained_s)

    def _restore(self, saved: dict[str, Any], frame: FrameType) -> None:
        assert self._initial is not None
        assert self._draws is not None
        assert self._muted_io is not None
        self.value_log.end()
        if interleaved := self._draws.compare(saved["random"]):
            self.refuse(
                f"both the script and its skipped data loading draw from {' and '.join(interleaved)}. Give the data set a random "
                f"generator of its own, or use loader workers"
            )
        resume_point = ResumePoint(saved, self.fake_operators, self._initial, self.refuse)
        reachable = self._reachable(frame)
        resume_point.compare(reachable, self.batches.prefetched_tensors())
        self.skipper.stop()
        self.files.leave_sandbox()  # before workers start: they would stay in the file sandbox
        self.batches.resume(saved["batches"])
        resume_point.restore(reachable)
        set_random_states(torch, saved["random"])
        self.files.resume(saved["files"])
        self._muted_io.stop()
        self.value_log.record(ValueJournal(self.journal, JournalPosition.from_json(saved["journal"])))
        self._trained_s = saved["trained_s"]


def _place_of(failure: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if is_user_file(frame.filename)]
    return f", at {os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
