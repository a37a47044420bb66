"""Keeps verified saves of a script that knows nothing of it: at intervals, at signals, and at its end.

A state is taken when a step begins, where weights, optimizers and schedulers are those of the step before. A signal waits for that, but not for long; what was
then taken inside a step says so. The copy that a model's end leaves behind (a model that belongs to a function goes before its process) is written when the
process ends and nothing newer was.
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
from flatout.engine.belongings import Belongings
from flatout.engine.epochs import Epochs
from flatout.measure.clock import seconds, sleep, thread_seconds, today
from flatout.plan.errors import FlatoutError
from flatout.state.drift import surroundings
from flatout.state.runs import begin_run
from flatout.state.saver import SHARE, Clocks, Saver
from flatout.state.saves import Saves, step_of
from flatout.state.values import Packed, pack

KIND = "rescue"
KEEP = 2
PATIENCE_S, LONGEST_PATIENCE_S = 5.0, 20.0  # for the end of a step after a signal; while an optimizer is at work, whose weights are of no step
SETTLING_S = 0.2  # after an optimizer, for schedulers and the like, before a signal that has waited is passed on
TRY_AGAIN_S = 30.0  # a folder that could not be opened


class Beside(Protocol):
    """Adds to saves what another process needs to go on exactly."""

    def beside(self, frame: FrameType | None) -> tuple[dict[str, Any], str]:
        """A part of the state, and why the program could not be gone on with exactly from it, or ""."""

    def told(self) -> dict[str, Any]:
        """What is told of it in the manifest."""

    def kept(self, step: int) -> None:
        """The save of this step was found right."""

    def flush(self) -> None:
        """Until what that part counts on is on the disk. Raises StorageError."""


class Rescue(Listener):
    """``say`` is for the person; ``may_begin`` is asked once, when the first step has ended: of several processes of a run one keeps saves. ``goes_on``:
    with the saves that are there, from the one of a step, and not in a new run."""

    goes_on: int | None = None
    signalled = False  # whatever the program makes of it, its end is not of its own accord
    cost_s = 0.0  # of a save, as far as it is known
    beside: Beside | None = None
    agrees: Callable[[bool, int], bool] = staticmethod(lambda wants, steps: wants)  # of several ranks all save after the same step

    def __init__(self, torch: Any, folder: Path, say: Callable[[str], None], may_begin: Callable[[], bool], ledger: Ledger) -> None:
        self.torch, self.folder, self.say, self.may_begin, self.ledger = torch, folder, say, may_begin, ledger
        self.schedulers, self.epochs = Schedulers(torch, ledger), Epochs(torch, ledger)
        self.signals = Signals(self._heard)
        self.scene: Any = None
        self.shown = os.path.relpath(folder)  # a program may go elsewhere
        self.saver: Saver | None = None
        self.belongings: Belongings | None = None
        self.pid, self.began_s = os.getpid(), seconds()
        self._active = self._inside = self._updating = self._updated = False
        self._pending: int | None = None  # a signal that waits for the end of a step
        self._reminders = 0
        self._rung = self._reminded = False
        self._leaving: tuple[int, Packed, dict[str, Any]] | None = None  # what a training was when its model went
        self._copies_s = self._retry_s = 0.0
        self._begun_step = -1  # of the last save that was begun
        self._saving = self._told = self._due = self._between = False

    def broke(self, error: Exception) -> None:
        """A mistake of ours: the program goes on, and what was kept stays."""
        self.say(f"flatout made a mistake ({type(error).__name__}: {error}), and nothing more is kept of this program")
        self.leave()
        self.scene.rest()

    def leave(self) -> None:
        """Keep nothing from here on; signals are the program's alone again."""
        self._active = False
        self.signals.leave()

    @property
    def active(self) -> bool:
        return self._active

    def begin(self, scene: Any) -> None:
        """When the first step has ended. Nothing is written before."""
        self.scene, self.pid = scene, os.getpid()
        self.epochs.first_step_ended()
        self._active = self.may_begin()
        if self._active:
            self.belongings = Belongings(scene, self.schedulers, self._gone)
            self.signals.install(self.ledger)
            if self.goes_on is not None:
                self._opened()

    # -- what is heard, in each step ------------------------------------------------------------------------------------

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        if not self._inside:
            self._step_begins()

    def backward_begin(self, losses: tuple) -> None:
        if not self._inside:  # a forward pass that nobody has heard: of no module, or inside a compiled function
            if self.beside is not None and self._active and not self.scene.boundaries.by_backward:
                return  # with an optimizer, it is gone on with from before its step, where there is no graph in flight
            self._step_begins(late=True)

    def backward_end(self) -> None:
        if self._active:
            self._updated |= self.scene.boundaries.by_backward  # a script without an optimizer changes its weights from here on, and nobody hears when

    def optimizer_begin(self, optimizer: Any) -> None:
        if not self._inside:
            self._step_begins()
        self._updating = True

    def optimizer_end(self, optimizer: Any) -> None:
        self._updating, self._updated = False, True

    def step_end(self) -> None:
        """Not yet the moment to save: schedulers, scalers and averaged copies are brought up to date after the optimizer."""
        self._inside = self._updating = self._updated = False
        if self._active:
            wants = self.saver.due(self.scene.steps) if self.saver is not None else seconds() >= self._retry_s
            self._due = self.agrees(wants or self._pending is not None, self.scene.steps)
            if self._pending is not None and self._due:
                self._remind(self._pending, SETTLING_S)

    def _step_begins(self, late: bool = False) -> None:
        """All of the step before is done; ``late``: something of this one, too."""
        if self.torch.compiler.is_compiling() or self.torch._C._are_functorch_transforms_active():
            return  # a hook that is compiled with the model, or hears of stand-ins for tensors: what comes next will be heard
        self._inside, self._between = late, not late
        if self._active and (self._due or (self._pending is not None and self.agrees(True, self.scene.steps))):
            self._due = False
            if self._pending is None:
                self._save("interval", sys._getframe(1))
            else:
                self._end_waiting()
        self._inside, self._between = True, False
        if not self._told:
            self._tell_what_is_kept()

    # -- saving ---------------------------------------------------------------------------------------------------------

    def _save(self, why: str, frame: FrameType | None, last: bool = False, ended: bool = False) -> bool:
        """Of the state as it is. ``last``: the training does not go on before it is written; ``ended``: it does not go on at all. Whether there is a save of it
        now, or will be."""
        self._saving = True
        try:
            dynamo = sys.modules.get("torch._dynamo")
            keep = self._keep if dynamo is None else dynamo.disable(self._keep)  # where functions are being compiled, ours are not
            return bool(keep(why, frame, last, ended))
        finally:
            self._saving = False

    def _keep(self, why: str, frame: FrameType | None, last: bool, ended: bool) -> bool:
        assert self.belongings is not None
        if self.saver is None and not self._opened():
            return False
        assert self.saver is not None
        began_s = seconds()
        self.signals.look_again()
        self.belongings.look(frame)
        if self.belongings.divided:
            self._active = False
            self.say("rescue: the weights of this program lie in parts on its ranks, and nothing is kept of them. Save them in the script.")
            return False
        step, packed, told = self._packed(why, ended, frame)
        self._begun_step, self._leaving = step, None
        if last:
            return self.saver.save_now(step, packed, told) is not None
        self.saver.save(step, packed, told, began_s)
        return True

    def _packed(self, why: str, ended: bool = False, frame: FrameType | None = None) -> tuple[int, Packed, dict[str, Any]]:
        """The steps that are done, their state, and what is told of it."""
        assert self.belongings is not None
        belongings, steps = self.belongings, self._steps_done() if ended else self.scene.steps
        inside = self._inside and steps == self.scene.steps
        state, exact = belongings.state(), None
        if self.beside is not None and self._between and not ended:
            state["exact"], exact = self.beside.beside(frame)
        packed = pack(self.torch, state)
        packed.left_out |= belongings.notes
        told: dict[str, Any] = {"why": why, "ran_s": round(seconds() - self.began_s, 1), "at": today(), "epoch": self.epochs.count, "inside": inside,
                                "updated": inside and self._updated, "holds": belongings.told(state), "surroundings": surroundings(self.torch)}
        if self.beside is not None and exact is not None:
            told |= {**self.beside.told(), "cost_s": self.saver.cost.last_s if self.saver is not None else 0.0}
            told["exact"] = exact or "; ".join(f"{where} ({what})" for where, what in packed.left_out.items() if where.startswith("exact."))
        return steps, packed, told

    def _opened(self) -> bool:
        try:
            saves = Saves(self.folder, KEEP, told=self.beside.kept if self.beside is not None else lambda step: None).open()
            try:
                if self.goes_on is None:
                    begin_run(saves)
                else:  # what was kept after it comes again
                    for path in saves.paths():
                        if step_of(path) > self.goes_on:
                            saves.discard(path)
            except FlatoutError:
                saves.close()
                raise
        except FlatoutError as error:
            if not self._retry_s:
                self.say(f"rescue: {error} The training goes on, and this is tried again.")
            self._retry_s = seconds() + TRY_AGAIN_S
            return False
        self.saver = Saver(self.torch, saves, KIND, Clocks(seconds, thread_seconds), lambda sentence: self.say(f"rescue: {sentence}"), share=SHARE,
                           sound=self._sound)
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
        self._told = True
        manifest = last.manifest
        size = sum(stored.bytes for stored in manifest.files.values())
        names = ", ".join(held["name"] for held in manifest.told["holds"]) or "nothing that trains"
        self.say(f"rescue keeps {names}: {size / 2**20:,.1f} MiB a save, the newest {KEEP}, in {self.shown}")
        if manifest.left_out:
            self.say(f"rescue cannot keep {'; '.join(f'{where} ({what})' for where, what in list(manifest.left_out.items())[:4])}")

    # -- signals --------------------------------------------------------------------------------------------------------

    def _heard(self, number: int) -> bool:
        """Whether the program gets the signal now. Called between any two instructions of the program, which must not hear of a mistake of ours."""
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
        if reminder and self._pending is None:  # the step has ended meanwhile
            return False
        if self._saving or (self._pending is None and (self._inside or self.beside is not None)):
            if self._pending is None:
                self._pending, self._reminded = number, False
                self._remind(number, PATIENCE_S)
                return False
            if reminder:  # what is being saved is what it was waiting for
                return False
        if self._pending is None:
            self._last_save(signal.Signals(number).name)
        elif reminder and self._updating and not self._reminded:
            self._reminded = True
            self._remind(number, LONGEST_PATIENCE_S - PATIENCE_S)
            return False
        elif reminder:
            self._last_save(signal.Signals(number).name)
        self._pending = None  # a second signal wants the end now
        return True

    def _remind(self, number: int, after_s: float) -> None:
        """Send ourselves the signal again after a while. No Thread of Python's: starting one takes locks that the program may hold just now."""
        self._reminders += 1
        _thread.start_new_thread(self._ring, (number, after_s, self._reminders))

    def _ring(self, number: int, after_s: float, reminder: int) -> None:
        sleep(after_s)
        main = threading.main_thread().ident
        if self._pending == number and self._reminders == reminder and main is not None:
            self._rung = True
            signal.pthread_kill(main, number)

    def _end_waiting(self) -> None:
        """The step that a signal waited for is done."""
        number = self._pending
        assert number is not None
        self._pending = None
        self._last_save(signal.Signals(number).name)
        self.scene.then = lambda: self.signals.pass_on(number, sys._getframe(1))

    def _last_save(self, why: str) -> None:
        """Before a signal is passed on: the state as it is now, unless its weights are of no step."""
        if self._updating:
            self.say(f"rescue: {why} came while an optimizer was at work, and it did not end in time; what was kept before stays")
        elif (self._kept_step() == self.scene.steps and not self._updated) or self._save(why, sys._getframe(1), last=True):
            self._tell_where(why)

    def _kept_step(self) -> int:
        """Of the newest save that can be believed, once nothing is being written any more; -1 where there is none."""
        if self.saver is None:
            return -1
        self.saver.wait()
        return self.saver.last.step if self.saver.last is not None else -1

    def _tell_where(self, why: str) -> None:
        if self.saver is not None and self.saver.last is not None:
            last = self.saver.last
            if not self._told:
                self._tell_what_is_kept()
            self.say(f"rescue: {why}; {where_of(last.manifest.told, last.step)} is kept. `flatout rescue` lists it, `flatout rescue --to DIR` writes it")

    # -- the end --------------------------------------------------------------------------------------------------------

    def _gone(self) -> None:
        """A module or an optimizer of the training has come to its end: a copy is kept in memory, while that costs next to nothing."""
        if not self._active or os.getpid() != self.pid or self._updating or self._saving or self.belongings is None or self.saver is None:
            return
        steps = self._steps_done()
        known = self._leaving[0] if self._leaving is not None else self._begun_step
        if known >= steps or self._copies_s > SHARE * (seconds() - self.began_s):
            return
        began_s = seconds()
        try:
            _, packed, told = self._packed("its end", ended=True)
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in packed.tensors.items()}
            self._leaving = steps, Packed(packed.tree, copies, packed.left_out), told
        except Exception as error:  # Python would print a traceback into the program's output
            self.say(f"rescue: the end of the training could not be kept ({type(error).__name__}: {error})")
        self._copies_s += seconds() - began_s

    def _steps_done(self) -> int:
        """Also the last one of a script without an optimizer, whose end nobody hears."""
        boundaries = self.scene.boundaries
        return int(self.scene.steps) + int(boundaries.by_backward and boundaries.pending and self._failure() is None)

    @staticmethod
    def _failure() -> BaseException | None:
        return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)

    def finish(self) -> None:
        """At the end of the process. Raises nothing."""
        if not self._active or os.getpid() != self.pid or self.belongings is None:
            return
        self._active = False
        try:
            failure = self._failure()
            number, self._pending = self._pending, None
            self._finish(signal.Signals(number).name if number is not None else type(failure).__name__ if failure is not None else "its end")
            if failure is not None and not isinstance(failure, KeyboardInterrupt):
                self._tell_where(type(failure).__name__)
            if number is not None:  # the program has ended by itself while the signal waited
                self.signals.pass_on(number, sys._getframe())
        except Exception as error:
            self.say(f"rescue: the end of the training could not be kept ({type(error).__name__}: {error})")

    def _finish(self, why: str) -> None:
        """What was copied when a model went, or what is still alive: where it is newer than what was kept."""
        steps, kept, leaving = self._steps_done(), self._kept_step(), self._leaving
        if leaving is not None and self.saver is not None and leaving[0] >= steps:
            if leaving[0] > kept:
                step, packed, told = leaving
                self.saver.save_now(step, packed, {**told, "why": why})
        elif not self._updating and (steps > kept or (self._inside and self._updated)) and self.belongings is not None and self.belongings.live:
            self._save(why, self._where_it_failed(), last=True, ended=True)
        if self.saver is not None:
            self.saver.saves.close()

    def _where_it_failed(self) -> FrameType | None:
        failure = self._failure()
        trace = failure.__traceback__ if failure is not None else None
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return trace.tb_frame if trace is not None else None


def where_of(told: Mapping[str, Any], step: int) -> str:
    """What a save is of: ``step 120``, or ``the inside of step 121``."""
    return f"the inside of step {step + 1}" if told.get("inside") else f"step {step}"
