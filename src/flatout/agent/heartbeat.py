"""Writes a heartbeat of the script (`plan.heartbeat`): a few numbers per step, and on a signal its Python stack.

    Optimizer post step hook        the count of steps
    torch.autograd.backward         the count of backward passes; in a script without optimizer objects, of steps
    a batch of a DataLoader         the count of batches; the wait for data is recorded
    DataLoader.__iter__             the numbers and processes of loader workers
    Module.eval                     from here to the next backward pass the script evaluates
    torch.save, torch.load          when a checkpoint was saved, and whether the script has resumed from one

It uses no thread and no clock. A request for the stack runs no Python code: faulthandler's handler writes it,
even while C code holds the interpreter. Forked children (loader workers) have their own page and stack.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.bootstrap import AfterImport
from flatout.agent.ledger import Ledger
from flatout.agent.steps import StepBoundaries
from flatout.job import heartbeat
from flatout.job.heartbeat import (
    BACKWARDS,
    BATCHES,
    BETWEEN,
    ENDING,
    EVALUATING,
    HEARTBEATS,
    IMPORTED,
    LOADING,
    NOT_FINITE,
    OPENING,
    PHASE,
    RANK,
    SAVING,
    SIGNAL,
    STACK,
    STEPS,
    TRAINING,
)
from flatout.schema.errors import NotFinite

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

ON_NAN = "FLATOUT_ON_NAN"
# a real-time signal; threads, debuggers and profilers use the first ones
ASKS_FOR_STACK = 45 if sys.platform == "linux" else 0
FIRST_DESCRIPTOR = 300  # high, so that scripts get small descriptors as usual
STEPPING = frozenset((TRAINING, OPENING, BETWEEN, IMPORTED))  # phases after which a batch is a training batch
LOOK_EVERY = 20  # steps, on a device: reading a value synchronises
_installed: HeartbeatWriter | None = None


class HeartbeatWriter:
    """Writes the heartbeat. ``page`` belongs to this process; a forked child gets its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.ledger = Ledger()
        self.boundaries = StepBoundaries()
        self.watches_losses = os.environ.get(ON_NAN) == "stop"
        self._not_finite: Tensor | None = None
        self._observed_losses = 0
        self._begin()

    def install(self) -> None:
        os.register_at_fork(after_in_child=self._begin)
        sys.meta_path.insert(0, AfterImport({"torch": self._torch_is_there}))

    def _begin(self) -> None:
        self.words = words = heartbeat.begin(self.folder).words
        rank = os.environ.get("FLATOUT_RANK") or os.environ.get("RANK") or ""
        words[RANK] = int(rank) + 1 if rank.isdigit() else 0
        if "torch" in sys.modules:
            words[PHASE] = IMPORTED
        try:
            self._can_be_asked()
        except (OSError, ValueError, RuntimeError, AttributeError):
            pass  # no descriptor left: the monitor must use /proc instead

    def _can_be_asked(self) -> None:
        if not ASKS_FOR_STACK or signal.getsignal(ASKS_FOR_STACK) is not signal.SIG_DFL:
            return  # the script handles this signal itself
        path = os.path.join(self.folder, f"stack.{os.getpid()}")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            kept = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        except OSError:  # the descriptor limit is lower
            kept = os.dup(handle)
        os.close(handle)
        faulthandler.register(ASKS_FOR_STACK, file=kept, all_threads=True, chain=False)
        self.words[STACK], self.words[SIGNAL] = kept, ASKS_FOR_STACK

    # -- hooks ----------------------------------------------------------------------------------------------

    def _torch_is_there(self, torch: ModuleType) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        ledger, data = self.ledger, torch.utils.data
        self.torch = torch
        ledger.call("optimizer step hook", register_optimizer_step_post_hook(self._stepped).remove)
        ledger.set(torch.autograd, "backward", self._beat_before_backward(torch.autograd.backward))
        iterator = data.dataloader._BaseDataLoaderIter
        ledger.set(iterator, "__next__", self._beat_around_next(iterator.__next__))
        ledger.set(data.DataLoader, "__iter__", self._note_workers(data.DataLoader.__iter__))
        ledger.set(torch.nn.Module, "eval", self._beat_before_eval(torch.nn.Module.eval))
        ledger.set(torch, "save", self._tell_of_save(torch.save))
        ledger.set(torch, "load", self._tell_of_load(torch.load))
        # handlers registered before torch's import, and torch's own cleanup, run later
        atexit.register(self._beat, ENDING)
        self._beat(IMPORTED)

    def _beat(self, phase: int) -> None:
        self.words[PHASE] = phase
        self.words[HEARTBEATS] += 1

    # These three run in every step, so each write costs time. Any changing number is a sign of life.

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        words = self.words
        words[STEPS if self.boundaries.optimizer_stepped(id(optimizer)) else HEARTBEATS] += 1
        words[PHASE] = TRAINING

    def _beat_before_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        boundaries = self.boundaries

        @wraps(backward)
        def hooked_backward(tensors: list[Tensor], *args: object, **kwargs: object) -> Any:
            words, steps_here = self.words, not boundaries.optimizer_seen
            if steps_here and boundaries.forward_or_backward_begins():
                words[STEPS] += 1
            words[BACKWARDS] += 1
            words[PHASE] = TRAINING
            if self.watches_losses:
                self._look_at(tensors)
            result = backward(tensors, *args, **kwargs)
            if steps_here:
                boundaries.backward_ended()
            return result

        return hooked_backward

    def _beat_around_next(self, take: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(take)
        def hooked_next(iterator: object) -> Any:
            words = self.words
            before = words[PHASE]
            if before != OPENING:  # the first batch of an iterator waits for its workers
                words[PHASE] = LOADING
            try:
                batch = take(iterator)
            except BaseException:
                words[PHASE] = BETWEEN
                words[BATCHES] += 1
                raise
            words[PHASE] = TRAINING if before in STEPPING else before
            words[BATCHES] += 1
            return batch

        return hooked_next

    def _note_workers(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(begin)
        def iter_notes(loader: DataLoader) -> Any:
            before = self.words[PHASE]
            self._beat(OPENING)
            iterator = begin(loader)
            workers = getattr(iterator, "_workers", None)
            if workers:
                self._write_workers(workers)
            self._beat(EVALUATING if before == EVALUATING else OPENING)
            return iterator

        return iter_notes

    def _write_workers(self, workers: Any) -> None:
        try:
            handle = os.open(
                os.path.join(self.folder, f"workers.{os.getpid()}"),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
        except OSError:
            return
        try:
            os.write(
                handle, "".join(f"{number} {worker.pid}\n" for number, worker in enumerate(workers)).encode()
            )
        except OSError:
            pass
        finally:
            os.close(handle)

    def _beat_before_eval(self, switch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(switch)
        def hooked_eval(module: Module) -> Any:
            if self.words[STEPS]:
                self._beat(EVALUATING)
            return switch(module)

        return hooked_eval

    def _tell_of_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def hooked_save(*args: object, **kwargs: object) -> Any:
            before = self.words[PHASE]
            if (
                self.boundaries.forward_or_backward_begins()
            ):  # without an optimizer object a step ends where something else begins
                self.words[STEPS] += 1
            self._beat(SAVING)
            try:
                result = save(*args, **kwargs)
            finally:
                self._beat(before)
            heartbeat.saved()
            return result

        return hooked_save

    def _tell_of_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def hooked_load(f: Any, *args: object, **kwargs: object) -> Any:
            result = load(f, *args, **kwargs)
            try:  # a data file is older than the run; a file written since is a checkpoint
                name = f if isinstance(f, (str, os.PathLike)) else f.name
                if os.stat(name).st_mtime_ns >= os.stat(os.path.join(self.folder, "begun")).st_mtime_ns:
                    heartbeat.checkpoint_read()
            except (OSError, AttributeError, TypeError, ValueError):
                pass
            return result

        return hooked_load

    # -- losses ---------------------------------------------------------------------------------------------

    def _look_at(self, losses: Tensor | Sequence[Tensor]) -> None:
        """End the script if a loss is NaN or infinite; on a device, up to LOOK_EVERY steps later.

        It raises SystemExit, which no ``except Exception`` catches.
        """
        loss = losses if isinstance(losses, self.torch.Tensor) else losses[0] if losses else None
        if loss is None or loss.numel() != 1:
            return
        strange = ~self.torch.isfinite(loss.detach()).reshape(())
        if loss.device.type != "cpu":
            self._not_finite = (
                strange
                if self._not_finite is None
                else self._not_finite | strange.to(self._not_finite.device)
            )
            self._observed_losses += 1
            if self._observed_losses % LOOK_EVERY:
                return
            strange, self._not_finite = self._not_finite, None
        if bool(strange):
            self.words[NOT_FINITE] = self.words[STEPS] + 1
            raise SystemExit(NotFinite.exit_code)


def install(folder: str) -> None:
    """Install the heartbeat at the start of a Python process of a monitored run."""
    global _installed
    if _installed is None:
        _installed = HeartbeatWriter(folder)
        _installed.install()


def failed(error: BaseException) -> None:
    """Report the exception that ends this process. Raises nothing."""
    if _installed is None:
        return
    try:
        import json
        import traceback

        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        info = {
            "pid": os.getpid(),
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "said": str(error)[:2000],
            "places": places[-60:],
        }
        path = os.path.join(_installed.folder, f"failed.{os.getpid()}")
        with open(
            os.open(f"{path}.new", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600),
            "w",
            encoding="utf-8",
            errors="replace",
        ) as out:
            json.dump(info, out)
        os.replace(f"{path}.new", path)
    except Exception:
        return
