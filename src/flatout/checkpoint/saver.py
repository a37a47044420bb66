"""Write checkpoints in the background: the training waits only for a copy of its state.

The interval keeps the cost within a given share of the time. Several ranks write one checkpoint: each writes its
own part into one folder, and rank 0 waits for all and writes the manifest. Ranks communicate only through the
folder: the writing threads must not use collectives, which the training may be using.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.checkpoint.checkpoints import Checkpoint, CheckpointFolder, write_state, writing_to
from flatout.checkpoint.disk import FileDigest, read_file, write_file
from flatout.checkpoint.manifest import Manifest
from flatout.checkpoint.values import Packed
from flatout.schema.errors import CheckpointError, FlatoutError, StorageError


class Snapshot:
    """Its memory is allocated once and reused. Call ``take`` only after the last copy has been read."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self._buffers: dict[str, Any] = {}
        self._copy_events: Any = None

    def take(self, packed: Packed) -> Packed:
        """The same state with copies of its tensors. Copies from a CUDA device arrive after `wait`.

        Later computation on the device does not change them."""
        buffers, devices = {}, set()
        for name, tensor in packed.tensors.items():
            copy = self._buffers.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                # Name the device: a program may have set another default (torch.set_default_device).
                copy = self.torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
            buffers[name] = copy.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        self._buffers = buffers
        self._copy_events = []
        for device in devices:
            event = self.torch.cuda.Event()
            event.record(self.torch.cuda.current_stream(device))
            self._copy_events.append(event)
        return Packed(packed.tree, buffers, packed.left_out)

    def wait(self) -> None:
        """Wait until all copies have arrived; called from the writing thread."""
        for event in self._copy_events or ():
            event.synchronize()


SHARE = 0.01


@dataclass(frozen=True)
class WriterClocks:
    """Wall-clock seconds, and CPU seconds of the calling thread."""

    wall_s: Callable[[], float]
    thread_s: Callable[[], float]


@dataclass
class CheckpointCost:
    """The cost of checkpoints so far, in seconds.

    It counts the time the training waited, and the CPU time of the writing thread, which takes a core from a
    training on the host."""

    checkpoints: int = 0
    waited_s: float = 0.0
    worked_s: float = 0.0
    last_s: float = 0.0


class CheckpointWriter:
    """Writes checkpoints in the background, at an interval that limits their cost.

    ``every``: steps between two checkpoints; None: as often as ``share`` of the time allows, including all
    costs.

    ``report`` receives sentences about failures: the training continues without that checkpoint, and the next
    one is tried. ``why_not_write`` checks a copy before it is written and returns why not to write it, or "".
    ``write`` replaces `CheckpointFolder.write` if several ranks each write a part; it returns None if the checkpoint
    belongs to another rank."""

    def __init__(
        self,
        torch: ModuleType,
        checkpoints: CheckpointFolder,
        kind: str,
        clocks: WriterClocks,
        report: Callable[[str], None],
        *,
        every: int | None = None,
        share: float = SHARE,
        why_not_write: Callable[[Packed], str] | None = None,
        write: Callable[[int, Packed, Mapping[str, Any]], Checkpoint | None] | None = None,
    ) -> None:
        self.checkpoints, self.kind, self.clocks, self.report = checkpoints, kind, clocks, report
        self.every, self.share, self.why_not_write = every, share, why_not_write
        self._write_copy = write or (
            lambda step, copy, metadata: checkpoints.write(kind, step, {"": copy}, metadata)
        )
        self.cost = CheckpointCost()
        self.last: Checkpoint | None = None
        self._snapshot = Snapshot(torch)
        self._thread: threading.Thread | None = None
        self.last_step = -1  # of the last checkpoint that was started or resumed from
        self._began_s = clocks.wall_s()
        self._last_failure = ""
        self._failures = 0

    def resume_after(self, step: int, cost_s: float = 0.0) -> None:
        """Register an existing checkpoint of this step.

        ``cost_s``: its recent cost, which delays the next one."""
        self.last_step, self.cost.last_s = step, cost_s

    def due(self, step: int) -> bool:
        """Whether to write a checkpoint now that ``step`` steps are done. Never twice for the same step."""
        if step == self.last_step:
            return False
        if self.every is not None:
            return step % self.every == 0
        if self._thread is not None and self._thread.is_alive():
            return False
        return self.clocks.wall_s() - self._began_s >= self.cost.last_s / self.share

    def save(
        self, step: int, packed: Packed, metadata: Mapping[str, Any], since_s: float | None = None
    ) -> None:
        """Copy the state and return; writing happens in the background.

        Waits for a checkpoint still being written.

        ``since_s``: when the training began to wait, if that was before this call."""
        began_s = self.clocks.wall_s() if since_s is None else since_s
        self._join()
        try:
            copy = self._snapshot.take(packed)
            thread = threading.Thread(
                target=self._write, args=(step, copy, dict(metadata)), name="flatout saves", daemon=True
            )
            self._account_wait(step, began_s)  # before the thread adds to it
            thread.start()
            self._thread = thread
        except (MemoryError, RuntimeError) as error:  # no memory for a copy, or no more threads allowed
            self._account_wait(step, began_s)
            self._report_failure(
                f"step {step} was not saved: its state could not be copied ({error}). The training continues."
            )

    def _account_wait(self, step: int, since_s: float) -> None:
        self._began_s = self.clocks.wall_s()
        self.cost.last_s = self._began_s - since_s
        if step != self.last_step:
            self.cost.checkpoints += 1
        self.cost.waited_s += self.cost.last_s
        self.last_step = step

    def save_now(self, step: int, packed: Packed, metadata: Mapping[str, Any]) -> Checkpoint | None:
        """Write the state itself in this thread, at the end of a process, when no thread may be started.

        Returns None if it failed."""
        self.wait()
        self.last_step = step
        self.cost.checkpoints += 1
        previous = self.last
        self._write(step, packed, metadata)
        return self.last if self.last is not previous else None

    def wait(self) -> None:
        """Wait until nothing is being written."""
        began_s = self.clocks.wall_s()
        self._join()
        self.cost.waited_s += self.clocks.wall_s() - began_s

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, copy: Packed, metadata: Mapping[str, Any]) -> None:
        began_s = self.clocks.thread_s()
        try:
            self._snapshot.wait()
            why_not = self.why_not_write(copy) if self.why_not_write is not None else ""
            if why_not:
                self._report_failure(f"step {step} was not saved: {why_not}. Earlier checkpoints stay.")
            else:
                self.last = self._write_copy(step, copy, metadata)
                if self._failures:
                    self.report(f"step {step} is saved; the {self._failures} attempts before it failed.")
                self._last_failure, self._failures = "", 0
        except FlatoutError as error:
            self._report_failure(f"step {step} was not saved: {error} The training continues.")
        except Exception as error:  # a thread that dies would go unnoticed
            self._report_failure(
                f"step {step} was not saved ({type(error).__name__}: {error}). The training continues."
            )
        worked_s = self.clocks.thread_s() - began_s
        self.cost.worked_s += worked_s
        self.cost.last_s += worked_s

    def _report_failure(self, sentence: str) -> None:
        self._failures += 1
        failure = sentence.partition(": ")[2]
        if failure != self._last_failure:
            self._last_failure = failure
            self.report(sentence)


TIMEOUT_S = 120.0
POLL_S = 0.02
MAX_NOTE_BYTES = 1 << 16


def part_of(rank: int) -> str:
    """The name of a rank's part in a checkpoint; rank 0's part is the checkpoint's own state."""
    return f"rank{rank}" if rank else ""


@dataclass(frozen=True)
class JointCheckpointWriter:
    """``folder_pid`` is the process of rank 0; its number is in the name of the unfinished folder."""

    checkpoints: CheckpointFolder
    kind: str
    rank: int
    ranks: int
    folder_pid: int
    why_not_write: Callable[[Packed], str]
    wall_s: Callable[[], float]
    sleep: Callable[[float], None]

    def write(self, step: int, packed: Packed, metadata: Mapping[str, Any]) -> Checkpoint | None:
        """The checkpoint on rank 0, None on the others. Raises StorageError, CheckpointError."""
        if self.rank == 0:
            return self._collect(step, packed, metadata)
        self._write_part(step, packed)
        return None

    def _begin(self, step: int, packed: Packed) -> Path:
        for note in self.checkpoints.folder.glob(".none-*"):
            note.unlink(missing_ok=True)
        try:
            if why_not := self.why_not_write(packed):
                raise CheckpointError(f"{why_not}. Earlier checkpoints stay.")
            return self.checkpoints.begin(step)
        except BaseException:
            self._failure_marker(step).touch()
            raise

    def _failure_marker(self, step: int) -> Path:
        return self.checkpoints.folder / f".none-{step}-{self.folder_pid}"

    def _collect(self, step: int, packed: Packed, metadata: Mapping[str, Any]) -> Checkpoint:
        unfinished = self._begin(step, packed)
        try:
            files, left_out = write_state(unfinished, "", packed), dict(packed.left_out)
            for rank in range(1, self.ranks):
                note = unfinished / f"{part_of(rank)}.note"
                self._until(
                    note.exists,
                    f"rank {rank} did not write its part within {TIMEOUT_S:.0f} s. All ranks must see the same folder "
                    f"{self.checkpoints.folder}",
                )
                with writing_to(self.checkpoints.folder):
                    part = json.loads(read_file(note, MAX_NOTE_BYTES))
                    note.unlink()
                files |= {name: FileDigest(size, digest) for name, (size, digest) in part["files"].items()}
                left_out |= {f"rank {rank}: {where}": what for where, what in part["left_out"].items()}
            return self.checkpoints.finish(unfinished, Manifest(self.kind, step, files, left_out, metadata))
        except BaseException:
            self.checkpoints.discard(unfinished)
            raise

    def _write_part(self, step: int, packed: Packed) -> None:
        unfinished = self.checkpoints.folder / f".writing-{step}-{self.folder_pid}"
        self._until(
            lambda: unfinished.exists() or self._failure_marker(step).exists(),
            f"rank 0 did not create its folder within {TIMEOUT_S:.0f} s. All ranks must see the same folder {self.checkpoints.folder}",
        )
        if not unfinished.exists():
            raise StorageError("rank 0 could not start the checkpoint.")
        name = part_of(self.rank)
        stored = write_state(unfinished, name, packed)
        note = {
            "files": {file: (content.bytes, content.sha256) for file, content in stored.items()},
            "left_out": packed.left_out,
        }
        with writing_to(self.checkpoints.folder):
            write_file(unfinished / f"{name}.half", [json.dumps(note).encode()])
            os.rename(unfinished / f"{name}.half", unfinished / f"{name}.note")

    def _until(self, is_ready: Callable[[], bool], why_not: str) -> None:
        end_s = self.wall_s() + TIMEOUT_S
        while not is_ready():
            if self.wall_s() > end_s:
                raise StorageError(f"{why_not}.")
            self.sleep(POLL_S)
