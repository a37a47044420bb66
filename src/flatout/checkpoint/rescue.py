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
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from flatout.checkpoint.rescue_writer import RescueState, RescueWriter, StepPhase
from flatout.checkpoint.saver import SHARE
from flatout.checkpoint.training_state import TrainingState
from flatout.checkpoint.values import Packed
from flatout.measure.clock import seconds, sleep

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.schema.program import TrainingContext

# How long a signal waits for the end of a step, and while an optimizer works, whose weights belong to no
# step.
TIMEOUT_S, LONGEST_TIMEOUT_S = 5.0, 20.0
SETTLING_S = 0.2  # wait for schedulers and the like after an optimizer, before passing on a waiting signal


@dataclass
class WaitingSignal:
    """A signal that waits for the end of a step. ``longer``: also while an optimizer works."""

    number: int
    reminders: int = 0
    longer: bool = False


class Rescue(RescueWriter):
    """Keeps checkpoints of the script in this process."""

    signalled = False  # a signal came, so the end is not the program's own
    _pending: WaitingSignal | None = None
    _is_reminder = False  # the next signal is a reminder

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
        if self._pending is None:
            self._last_save(signal.Signals(number).name)
        elif reminder and self.phase is StepPhase.UPDATING and not self._pending.longer:
            self._pending.longer = True
            self._remind(self._pending, LONGEST_TIMEOUT_S - TIMEOUT_S)
            return False
        elif reminder:
            self._last_save(signal.Signals(number).name)
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
        self._last_save(signal.Signals(number).name)
        self.context.deferred = lambda: self.signals.pass_on(number, sys._getframe(1))

    def _last_save(self, why: str) -> None:
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
        if (
            not self.active
            or os.getpid() != self.pid
            or self.phase is StepPhase.UPDATING
            or self._saving
            or self.training_state is None
            or self.saver is None
        ):
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
        if not self.active or os.getpid() != self.pid or self.training_state is None:
            return
        self.state = RescueState.STOPPED
        try:
            failure = self._failure()
            number, self._pending = self._pending.number if self._pending is not None else None, None
            self._finish(
                signal.Signals(number).name
                if number is not None
                else type(failure).__name__
                if failure is not None
                else "its end"
            )
            if failure is not None and not isinstance(failure, KeyboardInterrupt):
                self._report_saved(type(failure).__name__)
            if number is not None:  # the program ended while the signal waited
                self.signals.pass_on(number, sys._getframe())
        except Exception as error:
            self.notify(f"rescue: the final state could not be saved ({type(error).__name__}: {error})")

    def _finish(self, why: str) -> None:
        steps, saved, final_copy = self._steps_done(), self._saved_step(), self._final_copy
        if final_copy is not None and self.saver is not None and final_copy[0] >= steps:
            if final_copy[0] > saved:
                step, packed, metadata = final_copy
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
        trace = failure.__traceback__ if failure is not None else None
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return trace.tb_frame if trace is not None else None
