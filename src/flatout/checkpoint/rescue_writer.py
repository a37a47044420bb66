"""Writes the state of a running script as a checkpoint, and says what it keeps."""

import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Protocol

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.schedulers import Schedulers
from flatout.agent.signals import Signals
from flatout.checkpoint.checkpoints import CheckpointFolder, begin_run, step_of
from flatout.checkpoint.metadata import CheckpointMeta, ExactMeta, environment
from flatout.checkpoint.saver import SHARE, CheckpointWriter, WriterClocks
from flatout.checkpoint.training_state import TrainingState
from flatout.checkpoint.values import Packed, pack
from flatout.measure.clock import seconds, thread_seconds, utc_now
from flatout.schema.errors import FlatoutError
from flatout.schema.sizes import size

KIND = "rescue"
KEEP = 2
TRY_AGAIN_S = 30.0  # interval for opening the folder again


# Whether checkpoints are kept: not before the first step has ended, and never again once stopped.
RescueState = Enum("RescueState", "WAITING KEEPING STOPPED")


class StepPhase(Enum):
    """Where the program is in its step.

    ENDED: schedulers and the like follow. BETWEEN: the next step begins, and nothing of it has run. INSIDE:
    the weights are still those of the last step. UPDATING: an optimizer works. UPDATED: some weights are new."""

    ENDED, BETWEEN, INSIDE, UPDATING, UPDATED = range(5)

    @property
    def inside(self) -> bool:
        return self not in (StepPhase.ENDED, StepPhase.BETWEEN)


class ExactResumePart(Protocol):
    """Adds to checkpoints what another process needs to resume exactly."""

    next_command: str  # which resumes

    def extra_state(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        """Return a part of the state, and the reason why the program could not resume exactly from it, or ""."""

    def metadata(self, why_not: str, cost_s: float) -> ExactMeta:
        """The metadata of a checkpoint. ``why_not``: why the program could not resume from it, or ""."""

    def on_verified(self, step: int) -> None:
        """The checkpoint of this step was verified."""

    def flush(self) -> None:
        """Write everything that this part depends on to disk. Raises StorageError."""


class RescueWriter(Listener):
    """Packs and writes the present state.

    ``notify`` prints a message to the user. ``claim`` is called once, when the first step has ended: only one of
    several processes of a run keeps checkpoints. ``exact`` adds what an exact resume needs. ``resumed``: the step
    from which this run resumes, with its existing checkpoints, or None for a new run. ``cost_s``: cost of a
    checkpoint, if known."""

    def __init__(
        self,
        torch: ModuleType,
        folder: Path,
        notify: Callable[[str], None],
        claim: Callable[[], bool],
        ledger: Ledger,
        *,
        exact: ExactResumePart | None = None,
        resumed: int | None = None,
        cost_s: float = 0.0,
    ) -> None:
        self.torch, self.folder, self.notify, self.ledger = torch, folder, notify, ledger
        self._claim, self.signals = claim, Signals(self._on_signal)
        self._exact, self._resumed, self._cost_s = exact, resumed, cost_s
        self.schedulers = Schedulers(torch, ledger)
        self.context: Any = None
        self.shown_folder = os.path.relpath(folder)  # a program may change its working directory
        self.saver: CheckpointWriter | None = None
        self.training_state: TrainingState | None = None
        self.pid, self.began_s = os.getpid(), seconds()
        self.state, self.phase = RescueState.WAITING, StepPhase.ENDED
        self._retry_s = self._copies_s = 0.0
        self._final_copy: tuple[int, Packed, dict[str, Any]] | None = None  # the state when the model died
        self._started_step = -1  # step of the last started checkpoint
        self._saving = self._content_reported = self._due = False

    def _on_signal(self, number: int) -> bool:
        return True

    @property
    def active(self) -> bool:
        return self.state.name == "KEEPING"  # called at the end of Python, too, when globals are gone

    def _save(self, why: str, frame: FrameType | None, last: bool = False, ended: bool = False) -> bool:
        """Save the present state; return whether a checkpoint of it exists or will exist.

        ``last``: the training waits until it is written. ``ended``: the training does not continue at all."""
        self._saving = True
        try:
            dynamo = sys.modules.get("torch._dynamo")
            # do not compile our functions
            save = self._save_uncompiled if dynamo is None else dynamo.disable(self._save_uncompiled)
            return bool(save(why, frame, last, ended))
        finally:
            self._saving = False

    def _save_uncompiled(self, why: str, frame: FrameType | None, last: bool, ended: bool) -> bool:
        assert self.training_state is not None
        if self.saver is None and not self._open_folder():
            return False
        assert self.saver is not None
        began_s = seconds()
        self.signals.recheck()
        self.training_state.find(frame)
        if self.training_state.sharded:
            self.state = RescueState.STOPPED
            self.notify(
                "rescue: the weights of this program are sharded over its ranks, so no checkpoints are kept. Save them in the script."
            )
            return False
        step, packed, metadata = self._pack(why, ended, frame)
        self._started_step, self._final_copy = step, None
        if last:
            return self.saver.save_now(step, packed, metadata) is not None
        self.saver.save(step, packed, metadata, began_s)
        return True

    def _pack(
        self, why: str, ended: bool = False, frame: FrameType | None = None
    ) -> tuple[int, Packed, dict[str, Any]]:
        assert self.training_state is not None
        training_state, steps = self.training_state, self._steps_done() if ended else self.context.steps
        inside = self.phase.inside and steps == self.context.steps
        state, why_not = training_state.state(), None
        if self._exact is not None and self.phase is StepPhase.BETWEEN and not ended:
            state["exact"], why_not = self._exact.extra_state(frame)
        packed = pack(self.torch, state)
        packed.left_out |= training_state.notes
        exact = None
        if self._exact is not None and why_not is not None:
            cost_s = self.saver.cost.last_s if self.saver is not None else 0.0
            left_out = "; ".join(
                f"{where} ({what})" for where, what in packed.left_out.items() if where.startswith("exact.")
            )
            exact = self._exact.metadata(why_not or left_out, cost_s)
        meta = CheckpointMeta(
            why=why,
            ran_s=round(seconds() - self.began_s, 1),
            at=utc_now(),
            inside=inside,
            updated=inside and self.phase is StepPhase.UPDATED,
            holds=training_state.contents(state),
            surroundings=environment(self.torch),
            exact=exact,
        )
        return steps, packed, meta.to_json()

    def _open_folder(self) -> bool:
        try:
            checkpoints = CheckpointFolder(
                self.folder,
                KEEP,
                on_verified=self._exact.on_verified if self._exact is not None else lambda step: None,
            ).open()
            try:
                if self._resumed is None:
                    begin_run(checkpoints)
                else:  # the run writes later checkpoints again
                    for path in checkpoints.paths():
                        if step_of(path) > self._resumed:
                            checkpoints.discard(path)
            except FlatoutError:
                checkpoints.close()
                raise
        except FlatoutError as error:
            if not self._retry_s:
                self.notify(f"rescue: {error} The training continues, and flatout tries again.")
            self._retry_s = seconds() + TRY_AGAIN_S
            return False
        self.saver = CheckpointWriter(
            self.torch,
            checkpoints,
            KIND,
            WriterClocks(seconds, thread_seconds),
            lambda sentence: self.notify(f"rescue: {sentence}"),
            share=SHARE,
            why_not_write=self._why_not_write,
        )
        if self._resumed is not None:
            self.saver.resume_after(self._resumed, self._cost_s)
        return True

    def _why_not_write(self, copy: Packed) -> str:
        if self._exact is not None:
            self._exact.flush()
        return ""

    def _report_content(self) -> None:
        last = self.saver.last if self.saver is not None else None
        if last is None:
            return
        self._content_reported = True
        manifest = last.manifest
        stored_bytes = sum(stored.bytes for stored in manifest.files.values())
        meta = CheckpointMeta.from_json(manifest.metadata)
        names = ", ".join(saved.name for saved in meta.holds) or "nothing that trains"
        self.notify(
            f"rescue keeps {names}: {size(stored_bytes)} per checkpoint, the newest {KEEP}, in {self.shown_folder}"
        )
        if manifest.left_out:
            self.notify(
                f"rescue cannot keep {'; '.join(f'{where} ({what})' for where, what in list(manifest.left_out.items())[:4])}"
            )

    def _saved_step(self) -> int:
        if self.saver is None:
            return -1
        self.saver.wait()
        return self.saver.last.step if self.saver.last is not None else -1

    def _report_saved(self, why: str) -> None:
        if self.saver is not None and self.saver.last is not None:
            last = self.saver.last
            if not self._content_reported:
                self._report_content()
            meta = CheckpointMeta.from_json(last.manifest.metadata)
            saved = f"{why}; {meta.position(last.step)} is saved"
            if self._exact is not None and meta.resumes:
                self.notify(f"{saved}; {self._exact.next_command} continues from there")
            else:
                self.notify(
                    f"rescue: {saved}. `flatout rescue` lists it, `flatout rescue --to DIR` exports it"
                )

    def _steps_done(self) -> int:
        """The number of completed steps.

        Includes the last step of a script without an optimizer, whose end is not observed."""
        boundaries = self.context.boundaries
        return int(self.context.steps) + int(
            boundaries.by_backward and boundaries.pending and self._failure() is None
        )

    @staticmethod
    def _failure() -> BaseException | None:
        return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
