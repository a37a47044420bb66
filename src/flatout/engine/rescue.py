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
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from flatout.capture.ledger import Ledger
from flatout.capture.listener import Listener
from flatout.capture.schedulers import Schedulers
from flatout.capture.signals import Signals
from flatout.engine.epochs import EpochCounter
from flatout.engine.training_state import TrainingState
from flatout.measure.clock import seconds, sleep, thread_seconds, today
from flatout.plan.errors import FlatoutError
from flatout.state.checkpoints import CheckpointFolder, step_of
from flatout.state.drift import surroundings
from flatout.state.runs import begin_run
from flatout.state.saver import SHARE, CheckpointWriter, WriterClocks
from flatout.state.values import Packed, pack

KIND = "rescue"
KEEP = 2
# How long a signal waits for the end of a step, and while an optimizer works, whose weights belong to no
# step.
TIMEOUT_S, LONGEST_TIMEOUT_S = 5.0, 20.0
SETTLING_S = 0.2  # wait for schedulers and the like after an optimizer, before passing on a waiting signal
TRY_AGAIN_S = 30.0  # interval for opening the folder again


class ExactResumePart(Protocol):
    """Adds to checkpoints what another process needs to resume exactly."""

    next_command: str  # which resumes

    def beside(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        """A part of the state, and the reason why the program could not resume exactly from it, or ""."""

    def metadata(self) -> dict[str, Any]:
        """The metadata for the manifest."""

    def kept(self, step: int) -> None:
        """The checkpoint of this step was verified."""

    def flush(self) -> None:
        """Write everything that this part depends on to disk. Raises StorageError."""


class Rescue(Listener):
    """Keeps checkpoints of the script in this process.

    ``say`` prints a message to the user. ``may_begin`` is called once, when the first step has ended: only
    one of several processes of a run keeps checkpoints. ``goes_on`` is the step from which this run resumes,
    with its existing checkpoints, or None for a new run.
    """

    goes_on: int | None = None
    signalled = False  # a signal came, so the end is not the program's own
    cost_s = 0.0  # cost of a checkpoint, if known
    beside: ExactResumePart | None = None
    agrees: Callable[[bool, int], bool] = staticmethod(
        lambda wants, steps: wants
    )  # all ranks save after the same step

    def __init__(
        self,
        torch: Any,
        folder: Path,
        say: Callable[[str], None],
        may_begin: Callable[[], bool],
        ledger: Ledger,
    ) -> None:
        self.torch, self.folder, self.say, self.may_begin, self.ledger = torch, folder, say, may_begin, ledger
        self.schedulers, self.epochs = Schedulers(torch, ledger), EpochCounter(torch, ledger)
        self.signals = Signals(self._observed)
        self.context: Any = None
        self.shown = os.path.relpath(folder)  # a program may change its working directory
        self.saver: CheckpointWriter | None = None
        self.training_state: TrainingState | None = None
        self.pid, self.began_s = os.getpid(), seconds()
        self._active = self._inside = self._updating = self._updated = False
        self._pending: int | None = None  # a signal that waits for the end of a step
        self._reminders = 0
        self._rung = self._reminded = False
        self._leaving: tuple[int, Packed, dict[str, Any]] | None = None  # the state when the model died
        self._copies_s = self._retry_s = 0.0
        self._begun_step = -1  # step of the last started checkpoint
        self._saving = self._info = self._due = self._between = False

    def broke(self, error: Exception) -> None:
        """Handle an internal error: the program continues, and existing checkpoints stay."""
        self.say(
            f"rescue stops after an internal error ({type(error).__name__}: {error}); existing checkpoints stay"
        )
        self.leave()
        self.context.rest()

    def leave(self) -> None:
        """Keep no more checkpoints, and return signals to the program."""
        self._active = False
        self.signals.leave()

    @property
    def active(self) -> bool:
        return self._active

    def begin(self, context: Any) -> None:
        """Called when the first step has ended. Nothing is written before."""
        self.context, self.pid = context, os.getpid()
        self.epochs.first_step_ended()
        self._active = self.may_begin()
        if self._active:
            self.training_state = TrainingState(context, self.schedulers, self._gone)
            self.signals.install(self.ledger)
            if self.goes_on is not None:
                self._opened()

    # -- observations in each step ---------------------------------------------------------------------------

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        if not self._inside:
            self._step_begins()

    def backward_begin(self, losses: tuple) -> None:
        if not self._inside:  # the forward pass was not observed: no module, or inside a compiled function
            if self.beside is not None and self._active and not self.context.boundaries.by_backward:
                return  # with an optimizer, resuming starts before its step, where no graph is in flight
            self._step_begins(late=True)

    def backward_end(self) -> None:
        if self._active:
            # A script without an optimizer changes its weights from here on, unobserved.
            self._updated |= self.context.boundaries.by_backward

    def optimizer_begin(self, optimizer: Any) -> None:
        if not self._inside:
            self._step_begins()
        self._updating = True

    def optimizer_end(self, optimizer: Any) -> None:
        self._updating, self._updated = False, True

    def step_end(self) -> None:
        """Schedule a checkpoint; it is too early to save.

        Schedulers, scalers and averaged copies are updated after the optimizer.
        """
        self._inside = self._updating = self._updated = False
        if self._active:
            wants = (
                self.saver.due(self.context.steps) if self.saver is not None else seconds() >= self._retry_s
            )
            self._due = self.agrees(wants or self._pending is not None, self.context.steps)
            if self._pending is not None and self._due:
                self._remind(self._pending, SETTLING_S)

    def _step_begins(self, late: bool = False) -> None:
        """The previous step is complete. ``late``: part of the new step has run, too."""
        if self.torch.compiler.is_compiling() or self.torch._C._are_functorch_transforms_active():
            return  # the hook is being compiled, or receives fake tensors; the next call is observed
        self._inside, self._between = late, not late
        if self._active and (
            self._due or (self._pending is not None and self.agrees(True, self.context.steps))
        ):
            self._due = False
            if self._pending is None:
                self._save("interval", sys._getframe(1))
            else:
                self._end_waiting()
        self._inside, self._between = True, False
        if not self._info:
            self._tell_what_is_kept()

    # -- saving ----------------------------------------------------------------------------------------------

    def _save(self, why: str, frame: FrameType | None, last: bool = False, ended: bool = False) -> bool:
        """Save the present state; return whether a checkpoint of it exists or will exist.

        ``last``: the training waits until it is written. ``ended``: the training does not continue at all.
        """
        self._saving = True
        try:
            dynamo = sys.modules.get("torch._dynamo")
            keep = (
                self._keep if dynamo is None else dynamo.disable(self._keep)
            )  # do not compile our functions
            return bool(keep(why, frame, last, ended))
        finally:
            self._saving = False

    def _keep(self, why: str, frame: FrameType | None, last: bool, ended: bool) -> bool:
        assert self.training_state is not None
        if self.saver is None and not self._opened():
            return False
        assert self.saver is not None
        began_s = seconds()
        self.signals.look_again()
        self.training_state.look(frame)
        if self.training_state.divided:
            self._active = False
            self.say(
                "rescue: the weights of this program are sharded over its ranks, so no checkpoints are kept. Save them in the script."
            )
            return False
        step, packed, metadata = self._packed(why, ended, frame)
        self._begun_step, self._leaving = step, None
        if last:
            return self.saver.save_now(step, packed, metadata) is not None
        self.saver.save(step, packed, metadata, began_s)
        return True

    def _packed(
        self, why: str, ended: bool = False, frame: FrameType | None = None
    ) -> tuple[int, Packed, dict[str, Any]]:
        """The completed steps, their state, and its metadata."""
        assert self.training_state is not None
        training_state, steps = self.training_state, self._steps_done() if ended else self.context.steps
        inside = self._inside and steps == self.context.steps
        state, exact = training_state.state(), None
        if self.beside is not None and self._between and not ended:
            state["exact"], exact = self.beside.beside(frame)
        packed = pack(self.torch, state)
        packed.left_out |= training_state.notes
        metadata: dict[str, Any] = {
            "why": why,
            "ran_s": round(seconds() - self.began_s, 1),
            "at": today(),
            "epoch": self.epochs.count,
            "inside": inside,
            "updated": inside and self._updated,
            "holds": training_state.metadata(state),
            "surroundings": surroundings(self.torch),
        }
        if self.beside is not None and exact is not None:
            metadata |= {
                **self.beside.metadata(),
                "cost_s": self.saver.cost.last_s if self.saver is not None else 0.0,
            }
            metadata["exact"] = exact or "; ".join(
                f"{where} ({what})" for where, what in packed.left_out.items() if where.startswith("exact.")
            )
        return steps, packed, metadata

    def _opened(self) -> bool:
        try:
            saves = CheckpointFolder(
                self.folder, KEEP, metadata=self.beside.kept if self.beside is not None else lambda step: None
            ).open()
            try:
                if self.goes_on is None:
                    begin_run(saves)
                else:  # the run writes later checkpoints again
                    for path in saves.paths():
                        if step_of(path) > self.goes_on:
                            saves.discard(path)
            except FlatoutError:
                saves.close()
                raise
        except FlatoutError as error:
            if not self._retry_s:
                self.say(f"rescue: {error} The training continues, and flatout tries again.")
            self._retry_s = seconds() + TRY_AGAIN_S
            return False
        self.saver = CheckpointWriter(
            self.torch,
            saves,
            KIND,
            WriterClocks(seconds, thread_seconds),
            lambda sentence: self.say(f"rescue: {sentence}"),
            share=SHARE,
            sound=self._sound,
        )
        if self.goes_on is not None:
            self.saver.goes_on(self.goes_on, self.cost_s)
        return True

    def _sound(self, copy: Packed) -> str:
        if self.beside is not None:
            self.beside.flush()
        return ""

    def _tell_what_is_kept(self) -> None:
        last = self.saver.last if self.saver is not None else None
        if last is None:
            return
        self._info = True
        manifest = last.manifest
        size = sum(stored.bytes for stored in manifest.files.values())
        names = ", ".join(held["name"] for held in manifest.metadata["holds"]) or "nothing that trains"
        self.say(
            f"rescue keeps {names}: {size / 2**20:,.1f} MiB per checkpoint, the newest {KEEP}, in {self.shown}"
        )
        if manifest.left_out:
            self.say(
                f"rescue cannot keep {'; '.join(f'{where} ({what})' for where, what in list(manifest.left_out.items())[:4])}"
            )

    # -- signals ---------------------------------------------------------------------------------------------

    def _observed(self, number: int) -> bool:
        """Whether to pass the signal to the program now.

        Called between any two instructions of the program, which must not see an internal error.
        """
        try:
            return self._passes(number)
        except Exception as error:
            self.broke(error)
            return True

    def _passes(self, number: int) -> bool:
        self.signalled = True
        if not self._active:
            return True
        reminder, self._rung = self._rung, False
        if reminder and self._pending is None:  # the step has ended
            return False
        if self._saving or (self._pending is None and (self._inside or self.beside is not None)):
            if self._pending is None:
                self._pending, self._reminded = number, False
                self._remind(number, TIMEOUT_S)
                return False
            if reminder:  # the checkpoint in progress is the awaited one
                return False
        if self._pending is None:
            self._last_save(signal.Signals(number).name)
        elif reminder and self._updating and not self._reminded:
            self._reminded = True
            self._remind(number, LONGEST_TIMEOUT_S - TIMEOUT_S)
            return False
        elif reminder:
            self._last_save(signal.Signals(number).name)
        self._pending = None  # a second signal requests an immediate end
        return True

    def _remind(self, number: int, after_s: float) -> None:
        """Send this process the signal again after a while.

        No Python Thread: starting one takes locks that the program may hold.
        """
        self._reminders += 1
        _thread.start_new_thread(self._ring, (number, after_s, self._reminders))

    def _ring(self, number: int, after_s: float, reminder: int) -> None:
        sleep(after_s)
        main = threading.main_thread().ident
        if self._pending == number and self._reminders == reminder and main is not None:
            self._rung = True
            signal.pthread_kill(main, number)

    def _end_waiting(self) -> None:
        """The step that a signal waited for is complete."""
        number = self._pending
        assert number is not None
        self._pending = None
        self._last_save(signal.Signals(number).name)
        self.context.then = lambda: self.signals.pass_on(number, sys._getframe(1))

    def _last_save(self, why: str) -> None:
        """Save the present state before passing on a signal, unless its weights belong to no step."""
        if self._updating:
            self.say(
                f"rescue: {why} came during an optimizer step that did not end in time; earlier checkpoints stay"
            )
        elif (self._kept_step() == self.context.steps and not self._updated) or self._save(
            why, sys._getframe(1), last=True
        ):
            self._tell_where(why)

    def _kept_step(self) -> int:
        """The step of the newest valid checkpoint, after all writing has ended; -1 if there is none."""
        if self.saver is None:
            return -1
        self.saver.wait()
        return self.saver.last.step if self.saver.last is not None else -1

    def _tell_where(self, why: str) -> None:
        if self.saver is not None and self.saver.last is not None:
            last = self.saver.last
            if not self._info:
                self._tell_what_is_kept()
            metadata = last.manifest.metadata
            saved = f"{why}; {describe_position(metadata, last.step)} is saved"
            if self.beside is not None and metadata.get("exact") == "":
                self.say(f"{saved}; {self.beside.next_command} continues from there")
            else:
                self.say(f"rescue: {saved}. `flatout rescue` lists it, `flatout rescue --to DIR` exports it")

    # -- the end ---------------------------------------------------------------------------------------------

    def _gone(self) -> None:
        """A module or optimizer of the training dies: copy it to memory while that costs almost nothing."""
        if (
            not self._active
            or os.getpid() != self.pid
            or self._updating
            or self._saving
            or self.training_state is None
            or self.saver is None
        ):
            return
        steps = self._steps_done()
        known = self._leaving[0] if self._leaving is not None else self._begun_step
        if known >= steps or self._copies_s > SHARE * (seconds() - self.began_s):
            return
        began_s = seconds()
        try:
            _, packed, metadata = self._packed("its end", ended=True)
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in packed.tensors.items()}
            self._leaving = steps, Packed(packed.tree, copies, packed.left_out), metadata
        except Exception as error:  # Python would print a traceback into the program's output
            self.say(f"rescue: the final state could not be saved ({type(error).__name__}: {error})")
        self._copies_s += seconds() - began_s

    def _steps_done(self) -> int:
        """The number of completed steps.

        Includes the last step of a script without an optimizer, whose end is not observed.
        """
        boundaries = self.context.boundaries
        return int(self.context.steps) + int(
            boundaries.by_backward and boundaries.pending and self._failure() is None
        )

    @staticmethod
    def _failure() -> BaseException | None:
        return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)

    def finish(self) -> None:
        """Called at the end of the process. Raises nothing."""
        if not self._active or os.getpid() != self.pid or self.training_state is None:
            return
        self._active = False
        try:
            failure = self._failure()
            number, self._pending = self._pending, None
            self._finish(
                signal.Signals(number).name
                if number is not None
                else type(failure).__name__
                if failure is not None
                else "its end"
            )
            if failure is not None and not isinstance(failure, KeyboardInterrupt):
                self._tell_where(type(failure).__name__)
            if number is not None:  # the program ended while the signal waited
                self.signals.pass_on(number, sys._getframe())
        except Exception as error:
            self.say(f"rescue: the final state could not be saved ({type(error).__name__}: {error})")

    def _finish(self, why: str) -> None:
        """Write the copy of a dead model, or the state of a live one, if it is newer than the checkpoints."""
        steps, kept, leaving = self._steps_done(), self._kept_step(), self._leaving
        if leaving is not None and self.saver is not None and leaving[0] >= steps:
            if leaving[0] > kept:
                step, packed, metadata = leaving
                self.saver.save_now(step, packed, {**metadata, "why": why})
        elif (
            not self._updating
            and (steps > kept or (self._inside and self._updated))
            and self.training_state is not None
            and self.training_state.live
        ):
            self._save(why, self._where_it_failed(), last=True, ended=True)
        if self.saver is not None:
            self.saver.saves.close()

    def _where_it_failed(self) -> FrameType | None:
        failure = self._failure()
        trace = failure.__traceback__ if failure is not None else None
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return trace.tb_frame if trace is not None else None


def describe_position(metadata: Mapping[str, Any], step: int) -> str:
    """The position of a checkpoint: ``step 120``, or ``step 121 (in progress)``."""
    return f"step {step + 1} (in progress)" if metadata.get("inside") else f"step {step}"
