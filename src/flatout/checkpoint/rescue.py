"""Keeps verified checkpoints of any script: at intervals, at signals, and at its end.

A state is taken when a step begins: weights, optimizers and schedulers are then those after the previous
step. A signal waits briefly for that moment. A state taken inside a step is marked as such. A model that
belongs to a function dies before its process. Its last copy is written when the process ends, if no newer
state was written.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from traceback import walk_tb
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.schedulers import Schedulers
from flatout.agent.signals import Signals
from flatout.checkpoint.checkpoints import CheckpointFolder, begin_run, step_of
from flatout.checkpoint.metadata import CheckpointMeta, ExactMeta, environment
from flatout.checkpoint.saver import SHARE, CheckpointWriter, WriterClocks
from flatout.checkpoint.training_state import TrainingState
from flatout.checkpoint.values import Packed, pack
from flatout.measure.clock import seconds, sleep, thread_seconds, utc_now
from flatout.schema.errors import FlatoutError
from flatout.schema.sizes import size

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.schema.program import TrainingContext

KIND = "rescue"
KEEP = 2
TRY_AGAIN_S = 30.0  # interval for opening the folder again
# How long a signal waits for the end of a step, and while an optimizer works, whose weights belong to no
# step.
TIMEOUT_S, LONGEST_TIMEOUT_S = 5.0, 20.0
SETTLING_S = 0.2  # wait for schedulers and the like after an optimizer, before passing on a waiting signal

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


@dataclass
class WaitingSignal:
    """A signal that waits for the end of a step. ``longer``: also while an optimizer works."""

    number: int
    reminders: int = 0
    longer: bool = False


class Rescue(Listener):
    """Keeps checkpoints of the script in this process.

    ``notify`` prints a message to the user. ``claim`` is called once, when the first step has ended: only one of
    several processes of a run keeps checkpoints. ``exact`` adds what an exact resume needs. ``resumed``: the step
    from which this run resumes, with its existing checkpoints, or None for a new run. ``cost_s``: cost of a
    checkpoint, if known."""

    signalled = False  # a signal came, so the end is not the program's own
    _pending: WaitingSignal | None = None
    _is_reminder = False  # the next signal is a reminder

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

    @property
    def active(self) -> bool:
        return self.state.name == "KEEPING"  # called at the end of Python, too, when globals are gone

    @property
    def _in_own_process(self) -> bool:
        return self.active and os.getpid() == self.pid

    def on_error(self, error: Exception) -> None:
        """Handle an internal error: the program continues, and existing checkpoints stay."""
        self.notify(
            f"rescue stops after an internal error ({type(error).__name__}: {error}); existing checkpoints stay"
        )
        self.stop()
        self.context.stop_observing()

    def stop(self) -> None:
        """Keep no more checkpoints, and return signals to the program."""
        self.state = RescueState.STOPPED
        self.signals.uninstall()

    def begin(self, context: TrainingContext) -> None:
        """Called when the first step has ended. Nothing is written before."""
        self.context, self.pid = context, os.getpid()
        if self.state is RescueState.WAITING and self._claim():
            self.state = RescueState.KEEPING
            self.training_state = TrainingState(context, self.schedulers, self._on_deleted)
            self.signals.install(self.ledger)
            if self._resumed is not None:
                self._open_folder()

    # -- observations in each step

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.phase.inside:
            self._step_begins()

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        if not self.phase.inside:  # no forward pass was observed: no module, or inside a compiled function
            if self._exact is not None and self.active and not self.context.boundaries.by_backward:
                return  # with an optimizer, resuming starts before its step, where no graph is in flight
            self._step_begins(late=True)

    def backward_end(self) -> None:
        # A script without an optimizer changes its weights from here on, unobserved.
        if self.active and self.context.boundaries.by_backward and self.phase is not StepPhase.UPDATING:
            self.phase = StepPhase.UPDATED

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        if not self.phase.inside:
            self._step_begins()
        self.phase = StepPhase.UPDATING

    def optimizer_end(self, optimizer: Optimizer) -> None:
        self.phase = StepPhase.UPDATED

    def step_end(self) -> None:
        """Schedule a checkpoint; it is too early to save.

        Schedulers, scalers and averaged copies are updated after the optimizer."""
        self.phase = StepPhase.ENDED
        if self.active:
            due = self.saver.due(self.context.steps) if self.saver is not None else seconds() >= self._retry_s
            self._due = due or self._pending is not None
            if self._pending is not None:
                self._remind(self._pending, SETTLING_S)

    def _step_begins(self, late: bool = False) -> None:
        """The previous step is complete. ``late``: part of the new step has run, too."""
        if self.torch.compiler.is_compiling() or self.torch._C._are_functorch_transforms_active():
            return  # the hook is being compiled, or receives fake tensors; the next call is observed
        self.phase = StepPhase.INSIDE if late else StepPhase.BETWEEN
        if self.active and (self._due or self._pending is not None):
            self._due = False
            if self._pending is None:
                self._save("interval", sys._getframe(1))
            else:
                self._end_waiting()
        self.phase = StepPhase.INSIDE
        if not self._content_reported:
            self._report_content()

    # -- signals

    def _on_signal(self, number: int) -> bool:
        """Called between any two instructions of the program, which must not see an internal error."""
        try:
            return self._passes_on(number)
        except Exception as error:
            self.on_error(error)
            return True

    def _passes_on(self, number: int) -> bool:
        self.signalled = True
        if not self.active:
            return True
        reminder, self._is_reminder = self._is_reminder, False
        if reminder and self._pending is None:  # the step has ended
            return False
        if self._saving or (self._pending is None and (self.phase.inside or self._exact is not None)):
            if self._pending is None:
                self._pending = WaitingSignal(number)
                self._remind(self._pending, TIMEOUT_S)
                return False
            if reminder:  # the checkpoint in progress is the awaited one
                return False
        if reminder and self._pending and self.phase is StepPhase.UPDATING and not self._pending.longer:
            self._pending.longer = True
            self._remind(self._pending, LONGEST_TIMEOUT_S - TIMEOUT_S)
            return False
        if reminder or self._pending is None:
            self._last_save(number)
        self._pending = None  # a second signal requests an immediate end
        return True

    def _remind(self, waiting: WaitingSignal, after_s: float) -> None:
        """Send this process the signal again after a while.

        No Python Thread: starting one takes locks that the program may hold."""
        waiting.reminders += 1
        _thread.start_new_thread(self._ring, (waiting, after_s, waiting.reminders))

    def _ring(self, waiting: WaitingSignal, after_s: float, reminder: int) -> None:
        sleep(after_s)
        main = threading.main_thread().ident
        if self._pending is waiting and waiting.reminders == reminder and main is not None:
            self._is_reminder = True
            signal.pthread_kill(main, waiting.number)

    def _end_waiting(self) -> None:
        assert self._pending is not None
        number, self._pending = self._pending.number, None
        self._last_save(number)
        self.context.deferred = lambda: self.signals.pass_on(number, sys._getframe(1))

    def _last_save(self, number: int) -> None:
        why = signal.Signals(number).name
        if self.phase is StepPhase.UPDATING:
            self.notify(
                f"rescue: {why} came during an optimizer step that did not end in time; earlier checkpoints stay"
            )
        elif (self._saved_step() == self.context.steps and self.phase is not StepPhase.UPDATED) or self._save(
            why, sys._getframe(1), last=True
        ):
            self._report_saved(why)

    # -- the end

    def _on_deleted(self) -> None:
        """A module or optimizer of the training dies: copy it to memory while that costs almost nothing."""
        if not self._in_own_process or self.phase is StepPhase.UPDATING or self._saving or self.saver is None:
            return
        steps = self._steps_done()
        copied_step = self._final_copy[0] if self._final_copy is not None else self._started_step
        if copied_step >= steps or self._copies_s > SHARE * (seconds() - self.began_s):
            return
        began_s = seconds()
        try:
            _, packed, metadata = self._pack("its end", ended=True)
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in packed.tensors.items()}
            self._final_copy = steps, Packed(packed.tree, copies, packed.left_out), metadata
        except Exception as error:  # Python would print a traceback into the program's output
            self.notify(f"rescue: the final state could not be saved ({type(error).__name__}: {error})")
        self._copies_s += seconds() - began_s

    def finish(self) -> None:
        """Called at the end of the process. Raises nothing."""
        if not self._in_own_process or self.training_state is None:
            return
        self.state = RescueState.STOPPED
        try:
            failure = self._failure()
            name = type(failure).__name__ if failure is not None else "its end"
            waiting, self._pending = self._pending, None
            self._finish(signal.Signals(waiting.number).name if waiting is not None else name)
            if failure is not None and not isinstance(failure, KeyboardInterrupt):
                self._report_saved(name)
            if waiting is not None:  # the program ended while the signal waited
                self.signals.pass_on(waiting.number, sys._getframe())
        except Exception as error:
            self.notify(f"rescue: the final state could not be saved ({type(error).__name__}: {error})")

    def _finish(self, why: str) -> None:
        steps, saved, final_copy = self._steps_done(), self._saved_step(), self._final_copy
        if final_copy is not None and self.saver is not None and final_copy[0] >= steps:
            step, packed, metadata = final_copy
            if step > saved:
                self.saver.save_now(step, packed, {**metadata, "why": why})
        elif (
            self.phase is not StepPhase.UPDATING
            and (steps > saved or self.phase is StepPhase.UPDATED)
            and self.training_state is not None
            and self.training_state.live
        ):
            self._save(why, self._where_it_failed(), last=True, ended=True)
        if self.saver is not None:
            self.saver.checkpoints.close()

    def _where_it_failed(self) -> FrameType | None:
        failure = self._failure()
        frames = [frame for frame, _ in walk_tb(failure.__traceback__)] if failure is not None else []
        return frames[-1] if frames else None

    # -- writing the present state

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
            left_out = {where: what for where, what in packed.left_out.items() if where.startswith("exact.")}
            exact = self._exact.metadata(why_not or _listed(left_out), cost_s)
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
            checkpoints = CheckpointFolder(self.folder, KEEP)
            if self._exact is not None:
                checkpoints.on_verified = self._exact.on_verified
            checkpoints.open()
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
            self.notify(f"rescue cannot keep {_listed(dict(list(manifest.left_out.items())[:4]))}")

    def _saved_step(self) -> int:
        if self.saver is None:
            return -1
        self.saver.wait()
        return self.saver.last.step if self.saver.last is not None else -1

    def _report_saved(self, why: str) -> None:
        if not self._content_reported:
            self._report_content()
        if self.saver is None or self.saver.last is None:
            return
        last = self.saver.last
        meta = CheckpointMeta.from_json(last.manifest.metadata)
        saved = f"{why}; {meta.position(last.step)} is saved"
        if self._exact is not None and meta.resumes:
            self.notify(f"{saved}; {self._exact.next_command} continues from there")
        else:
            self.notify(f"rescue: {saved}. `flatout rescue` lists it, `flatout rescue --to DIR` exports it")

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


def _listed(left_out: Mapping[str, str]) -> str:
    return "; ".join(f"{where} ({what})" for where, what in left_out.items())
