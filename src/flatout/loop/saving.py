"""A Loop with ``checkpoint_dir=``: resume from the newest valid checkpoint, and write new ones between two steps.

A checkpoint describes the moment before a step, when the body of the ``for`` has run for the previous one.
The copy is taken at that moment and written in the background. The program waits for it before it ends.
"""

import hashlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from flatout.checkpoint.checkpoints import Checkpoint, CheckpointFolder, verified
from flatout.checkpoint.loading import LoaderPosition
from flatout.checkpoint.metadata import differences, environment
from flatout.checkpoint.random_states import random_states, set_random_states
from flatout.checkpoint.saver import CheckpointWriter, JointCheckpointWriter, WriterClocks, part_of
from flatout.checkpoint.values import Packed, pack
from flatout.data.streams import own_generators
from flatout.job import heartbeat
from flatout.job.folder import read_json
from flatout.levers import TABLE
from flatout.loop.loop_state import LoopState
from flatout.loop.rank_group import RankGroup
from flatout.measure.clock import seconds, sleep, thread_seconds
from flatout.schema.enums import Effect, Moment
from flatout.schema.errors import CheckpointError, FlatoutError, LoopError

# What a Loop resumes from: opens the checkpoint folder, reads the parts that this rank needs, reports the result.
#
# One process opens the folder, and all ranks use the checkpoint that it chose.

CHECKPOINT_KIND = "loop"
TRIAL_ENTRY = "flatout.trial."

LOGGER = logging.getLogger("flatout")


def is_trial_process() -> bool:
    """Whether flatout measures this process. Such a process does not resume and leaves nothing behind."""
    path = os.environ.get("FLATOUT_JOB")
    job = read_json(Path(path)) if path else None
    return isinstance(job, dict) and str(job.get("entry", "")).startswith(TRIAL_ENTRY)


@dataclass
class OpenedCheckpoints:
    """``checkpoint`` is the checkpoint to resume from, None for a new training.

    ``damaged``: the new paths of newer, corrupt checkpoints. ``writer_pid``: the process that makes the
    folders of new checkpoints."""

    folder: CheckpointFolder
    checkpoint: Checkpoint | None
    damaged: list[Path]
    writer_pid: int

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.checkpoint.manifest.metadata) if self.checkpoint is not None else {}


def open_checkpoints(folder: Path, from_scratch: bool, group: RankGroup | None) -> OpenedCheckpoints:
    """Open a checkpoint folder.

    Raises CheckpointError if there are checkpoints and all are corrupt, StorageError if the folder cannot be
    written."""
    if not from_scratch:
        heartbeat.resumes_by_itself(folder)
    if group is None:
        return _open_on_first_rank(folder, from_scratch)
    checkpoints: OpenedCheckpoints | None = None
    error: FlatoutError | None = None
    local: dict[str, Any] = {"save": None, "pid": os.getpid(), "error": "", "folder": str(folder.resolve())}
    if group.rank == 0:
        try:
            checkpoints = _open_on_first_rank(folder, from_scratch)
            if checkpoints.checkpoint is not None:
                local["save"] = str(checkpoints.checkpoint.path)
        except FlatoutError as failed:
            error, local["error"] = failed, str(failed)
    first_rank = group.broadcast(local)
    if error is not None:
        raise error
    if first_rank["error"]:
        raise CheckpointError(f"rank 0 cannot resume, so all ranks stop: {first_rank['error']}")
    if checkpoints is None:
        checkpoints = OpenedCheckpoints(
            CheckpointFolder(Path(first_rank["folder"])), None, [], first_rank["pid"]
        )
        if first_rank["save"] is not None:
            try:
                checkpoints.checkpoint = verified(Path(first_rank["save"]))
            except CheckpointError as failed:
                error = CheckpointError(
                    f"{first_rank['save']} is the checkpoint of rank 0; on this rank, {failed}. All ranks must see the same folder."
                )
    group.raise_if_any_failed(error)
    return checkpoints


def _open_on_first_rank(folder: Path, from_scratch: bool) -> OpenedCheckpoints:
    # a restarted program resumes from it by itself
    checkpoints = CheckpointFolder(folder, on_verified=heartbeat.checkpoint_written).open()
    try:
        if from_scratch:
            moved_to = checkpoints.move_all_aside()
            if moved_to is not None:
                LOGGER.info("from_scratch=True: moved the existing checkpoints to %s", moved_to)
            return OpenedCheckpoints(checkpoints, None, [], os.getpid())
        checkpoint, corrupt_checkpoints = checkpoints.newest()
        if checkpoint is not None and checkpoint.manifest.kind != CHECKPOINT_KIND:
            raise LoopError(
                f"{checkpoint.path} was not written by a flatout.Loop. Name another folder in checkpoint_dir=."
            )
        damaged = [checkpoints.set_aside(corrupt) for corrupt in corrupt_checkpoints]
    except BaseException:
        checkpoints.close()
        raise
    for corrupt, path in zip(corrupt_checkpoints, damaged, strict=True):
        LOGGER.warning(
            "checkpoint %s is corrupt: %s. It was moved to %s", corrupt.path.name, corrupt.why, path
        )
    return OpenedCheckpoints(checkpoints, checkpoint, damaged, os.getpid())


def read_states(
    torch: ModuleType, checkpoint: Checkpoint, rank: int, ranks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the whole training, and that of this rank. Raises CheckpointError."""
    before = checkpoint.manifest.metadata["ranks"]
    if before != ranks:
        raise CheckpointError(
            f"{checkpoint.path} is of {before} rank{'s' * (before > 1)}, and {ranks} would resume from it: each rank has its own place in "
            f"the data. Start {before} again, or use from_scratch=True to start from scratch."
        )
    state = checkpoint.read(torch)
    return state, checkpoint.read(torch, part_of(rank)) if rank else state


@dataclass(frozen=True)
class Resumed:
    """Result of resuming, as ``loop.resumed``.

    ``step``: optimizer steps already done. ``epoch``: from 0. ``path``: the checkpoint. ``differs``:
    differences in the environment since. ``inexact``: state that was not, or could not be, restored exactly.
    ``damaged``: the new paths of newer, corrupt checkpoints."""

    step: int
    epoch: int
    path: Path
    differs: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the training will end bitwise identical to an uninterrupted one."""
        return not self.differs and not self.inexact

    def sentences(self) -> list[str]:
        how = "bitwise exact" if self.exact else "not bitwise identical to an uninterrupted run"
        return [
            *(f"{path} is a newer, corrupt checkpoint; it was moved there" for path in self.damaged),
            f"resuming after step {self.step}, in epoch {self.epoch}, from {self.path}: {how}",
            *(f"differs: {reason}" for reason in self.differs),
            *(f"not exact: {reason}" for reason in self.inexact),
        ]


STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


class StopSignals:
    """Signals that ask a training to end: it finishes its step and writes a checkpoint first.

    ``received``: the number of the first one, 0 if there was none. The second one ends the program at once. The
    handlers are installed only while a Loop is iterated over, in the main thread."""

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers. Ignored signals stay ignored (nohup), and handlers of C libraries stay."""
        if threading.current_thread() is not threading.main_thread() or self._previous:
            return
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)
            previous = signal.getsignal(number) if number is not None else None
            if number is not None and previous not in (None, signal.SIG_IGN):
                self._previous[number] = previous
                signal.signal(number, self._observe)

    def _observe(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for other in self._previous:
            signal.signal(other, signal.SIG_DFL)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    def end(self) -> None:
        """Do what the signal would have done.

        This calls the program's own handler, then exits with 128 plus the signal's number. Raises SystemExit,
        or the exception of that handler: KeyboardInterrupt if the program has no handler for SIGINT."""
        previous = self._previous.get(self.received)
        number = self.received
        self.restore()
        if callable(previous):
            previous(number, None)
        raise SystemExit(128 + number)


LEVERS = {lever.name: lever for lever in TABLE}


class LoopCheckpointing:
    """``opened``: the folder and the checkpoint to resume from.

    ``group``: the ranks that write one checkpoint together, None for a single process."""

    def __init__(
        self,
        torch: ModuleType,
        opened: OpenedCheckpoints,
        every: int | None,
        on_drift: str,
        group: RankGroup | None,
    ) -> None:
        self.torch, self.opened, self.folder, self.every = torch, opened, opened.folder, every
        self.group = group
        self.stops_on_drift = on_drift == "stop"
        self._script = {"script": digest} if (digest := _digest_of_script()) else {}
        self.rank, self.ranks = (group.rank, group.ranks) if group is not None else (0, 1)
        self._signals = StopSignals()
        self._open = True
        self._inexact: list[str] = []  # from the earlier run
        self._start = 0, 0  # step and epoch at which this training began
        self._resumed_state: dict[str, Any] | None = None

    # -- resuming

    def attach(self, loop: Any, loop_state: LoopState, settings: Mapping[str, Any]) -> Resumed | None:
        """Restore a checkpoint into the new Loop.

        Random numbers and the place in the data wait until the Loop is iterated over."""
        self.loop, self.loop_state, self.settings = loop, loop_state, settings
        self.position = LoaderPosition(self.torch, loop.loader, own_generators)
        parameters = self.loop_state.parameters()
        clocks = WriterClocks(seconds, thread_seconds)

        def check_finite(packed: Packed) -> str:
            return _not_finite(self.torch, packed, parameters)

        options: dict[str, Any] = {"why_not_write": check_finite}
        if self.ranks > 1:
            writer = JointCheckpointWriter(
                self.folder,
                CHECKPOINT_KIND,
                self.rank,
                self.ranks,
                self.opened.writer_pid,
                check_finite,
                seconds,
                sleep,
            )
            options = {"write": writer.write}
        self.saver = CheckpointWriter(
            self.torch, self.folder, CHECKPOINT_KIND, clocks, LOGGER.warning, every=self.every, **options
        )
        if self.opened.checkpoint is None:
            return None
        resumed, error = None, None
        try:
            resumed = self._resume(self.opened.checkpoint)
        except FlatoutError as failed:
            error = failed
        if self.group is not None:
            self.group.raise_if_any_failed(error)
        elif error is not None:
            self.folder.close()
            raise error
        return resumed

    def _resume(self, checkpoint: Checkpoint) -> Resumed:
        metadata = checkpoint.manifest.metadata
        differs = differences(metadata.get("environment", {}), self._environment())
        state, rank_state = read_states(self.torch, checkpoint, self.rank, self.ranks)
        inexact = [
            *metadata.get("inexact", ()),
            *(f"{where} ({what}) was not stored" for where, what in checkpoint.manifest.left_out.items()),
        ]
        if self.stops_on_drift and differs:
            self._refuse(checkpoint, differs)
        inexact += [f"{where} differs from the checkpoint" for where in self.loop_state.restore(state)]
        self.loop_state.restore_buffers(rank_state.get("all buffers", {}))
        moved = self.position.resume(rank_state["loader_position"])
        if self.stops_on_drift and moved:
            self._refuse(checkpoint, moved)
        differs += moved
        counts = state["loop"]
        self.loop.index, self.loop.epoch = counts["index"], counts["epoch"]
        self._start = counts["first_index"], counts["first_epoch"]
        self.saver.resume_after(checkpoint.step)
        self._inexact, self._resumed_state = list(dict.fromkeys([*inexact, *differs])), rank_state
        resumed = Resumed(
            checkpoint.step,
            counts["epoch"],
            checkpoint.path,
            tuple(differs),
            tuple(dict.fromkeys(inexact)),
            tuple(self.opened.damaged),
        )
        if self.rank == 0:
            for sentence in resumed.sentences():
                LOGGER.log(logging.INFO if resumed.exact else logging.WARNING, sentence)
        return resumed

    def _refuse(self, checkpoint: Checkpoint, differs: list[str]) -> None:
        raise LoopError(
            f'{checkpoint.path} cannot be resumed exactly: {"; ".join(differs)}. Use on_drift="warn" to resume anyway, or '
            "from_scratch=True to start from scratch."
        )

    # -- while the Loop is iterated over

    def begin(self) -> tuple[int, int]:
        """Restore the random numbers of the checkpoint.

        Returns the step and epoch at which this training began."""
        if not self._open and self.rank == 0:
            self.folder.open()
        self._open = True
        self._signals.listen()
        if self._resumed_state is None:
            self._start = self.loop.index, self.loop.epoch
            return self._start
        for sentence in set_random_states(self.torch, self._resumed_state["random"]):
            LOGGER.warning(sentence)
        self._resumed_state = None
        return self._start

    def batches(self) -> Iterator[Any]:
        """The batches of one epoch, or the rest of it."""
        if self.position.workers:
            self.saver.wait()  # forking while a thread writes may leave locks held for ever in the child
        return self.position.epoch()

    @property
    def consumed_batches(self) -> int:
        """Batches of the coming epoch that were consumed before the interruption."""
        return self.position.already_consumed

    def between_steps(self) -> None:
        """Call between two steps. Raises SystemExit after a checkpoint if a signal has requested the end."""
        stop_signal, due = self._signals.received, int(self.saver.due(self.loop.index))
        if self.group is not None:
            stop_signal, due = self.group.maxima([stop_signal, due if self.rank == 0 else 0])
        if stop_signal:
            self._signals.received = stop_signal
            self.finish()
        elif due:
            self._save()

    def finish(self) -> None:
        """Write a last checkpoint and wait for it. Raises SystemExit if a signal has requested the end."""
        if self.saver.last_step != self.loop.index:
            self._save()
        self.saver.wait()
        if self.group is not None:  # wait for the parts of all ranks: a launcher ends the others at once
            self._signals.received = self.group.maxima([self._signals.received])[0]
        if self._signals.received:
            if self.rank == 0:
                last, saved = self.saver.last, "could not save it; see above"
                if last is not None and last.step == self.loop.index:
                    saved = f"saved it in {last.path}"
                LOGGER.warning(
                    "stopped by signal %d: finished step %d, and %s",
                    self._signals.received,
                    self.loop.index - 1,
                    saved,
                )
            self._signals.end()

    def close(self) -> None:
        """Call when the iteration ends for any reason."""
        self._signals.restore()
        self.saver.wait()
        self.folder.close()
        self._open = False

    def _save(self) -> None:
        loop, began_s = self.loop, seconds()
        state = {"random": random_states(self.torch), "loader_position": self.position.place()}
        if self.rank == 0:
            state |= self.loop_state.state()
            state["loop"] = {
                "index": loop.index,
                "epoch": loop.epoch,
                "first_index": self._start[0],
                "first_epoch": self._start[1],
            }
        else:
            state |= self.loop_state.rank_part()
        metadata = {"environment": self._environment(), "inexact": self._why_not_exact(), "ranks": self.ranks}
        self.saver.save(loop.index, pack(self.torch, state), metadata, began_s)
        if self.every == 1:
            self.saver.wait()  # with save_every=1 no step may be lost, not even one that is being written

    def _why_not_exact(self) -> list[str]:
        loop = self.loop
        reasons = [*self._inexact, *self.position.inexact]
        if self.ranks > 2 and isinstance(loop.model, self.torch.nn.parallel.DistributedDataParallel):
            reasons.append(
                "more than two ranks add their gradients in another order in the first step of a process"
            )
        if loop.sizing:
            reasons.append("it was saved while sizing micro-batches")
        levers = [lever for choice in loop.plan if (lever := LEVERS.get(choice.name)) is not None]
        reasons += [
            f"the lever {lever.name} acts from the second step on and rounds differently"
            for lever in levers
            if lever.effect is not Effect.EXACT and lever.moment not in (Moment.PROCESS, Moment.LOADER)
        ]
        if self.position.workers and any(lever.moment is Moment.LOADER for lever in levers):
            reasons.append(
                "levers of the plan make the batches, so the random numbers of loader workers are unknown"
            )
        return list(dict.fromkeys(reasons))

    def _environment(self) -> dict[str, Any]:
        return environment(self.torch, {**self.settings, "plan": self.loop.plan.describe(), **self._script})


def _digest_of_script() -> str | None:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else None
    except OSError:
        return None


def _not_finite(torch: ModuleType, packed: Packed, parameters: set[str]) -> str:
    """The first non-finite parameter, or "". A corrupt model must not replace a good one."""
    for name, tensor in packed.tensors.items():
        if name in parameters and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
    return ""
