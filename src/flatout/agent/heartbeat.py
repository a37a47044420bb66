"""Writes a heartbeat of the script (`job/heartbeat.py`): a few numbers per step, and on a signal its Python stack.

    steps, backward passes, batches     counted by `StepCounters`
    torch.save, torch.load              when a checkpoint was saved, and whether the script has resumed from one

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
from flatout.agent.loader_methods import wrap_loader_method
from flatout.agent.steps import StepBoundaries
from flatout.job import heartbeat
from flatout.job.heartbeat import Slot
from flatout.measure.clock import HostClock
from flatout.measure.statistics import median
from flatout.schema.errors import NotFinite

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


ON_NAN = "FLATOUT_ON_NAN"
# a real-time signal; threads, debuggers and profilers use the first ones
STACK_SIGNAL = 45 if sys.platform == "linux" else 0
FIRST_DESCRIPTOR = 300  # high, so that scripts get small descriptors as usual
CHECK_EVERY_STEPS = 20  # steps, on a device: reading a value synchronises
_installed: HeartbeatWriter | None = None


class HeartbeatWriter:
    """Writes the heartbeat. ``page`` are the page of this process; a forked child gets its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.counters: StepCounters | None = None
        self._not_finite: Tensor | None = None
        self._checked_losses = 0
        self._begin()

    def install(self) -> None:
        os.register_at_fork(after_in_child=self._begin)
        sys.meta_path.insert(0, AfterImport({"torch": self._after_torch_import}))

    def _begin(self) -> None:
        self.page = page = heartbeat.begin(self.folder).slots
        rank = os.environ.get("FLATOUT_RANK") or os.environ.get("RANK") or ""
        page[Slot.RANK] = int(rank) + 1 if rank.isdigit() else 0
        if self.counters is not None:
            self.counters.page = page
        try:
            self._register_stack_dump()
        except (OSError, ValueError, RuntimeError, AttributeError):
            pass  # no descriptor left: the monitor must use /proc instead

    def _register_stack_dump(self) -> None:
        if not STACK_SIGNAL or signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
            return  # the script handles this signal itself
        path = os.path.join(self.folder, f"stack.{os.getpid()}")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            descriptor = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        except OSError:  # the descriptor limit is lower
            descriptor = os.dup(handle)
        os.close(handle)
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)
        self.page[Slot.STACK_DESCRIPTOR], self.page[Slot.STACK_SIGNAL] = descriptor, STACK_SIGNAL

    def _after_torch_import(self, torch: ModuleType) -> None:

        self.torch = torch
        self.page[Slot.HEARTBEATS] += 1
        # handlers registered before torch's import, and torch's own cleanup, run later
        atexit.register(self.page.__setitem__, Slot.EXITING, 1)
        self.counters = counters(torch)
        self.counters.page = self.page
        if os.environ.get(ON_NAN) == "stop":
            self.counters.on_losses = self._check_losses
        ledger = Ledger()
        ledger.set(torch, "save", self._wrap_save(torch.save))
        ledger.set(torch, "load", self._wrap_load(torch.load))

    def _wrap_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def hooked_save(*args: object, **kwargs: object) -> Any:
            self.page[Slot.HEARTBEATS] += 1
            result = save(*args, **kwargs)
            heartbeat.checkpoint_written()
            return result

        return hooked_save

    def _wrap_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
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

    # -- losses

    def _check_losses(self, losses: Tensor | Sequence[Tensor]) -> None:
        """End the script if a loss is NaN or infinite; on a device, up to CHECK_EVERY_STEPS steps later.

        It raises SystemExit, which no ``except Exception`` catches.
        """
        loss = losses if isinstance(losses, self.torch.Tensor) else losses[0] if losses else None
        if loss is None or loss.numel() != 1:
            return
        not_finite = ~self.torch.isfinite(loss.detach()).reshape(())
        if loss.device.type != "cpu":
            self._not_finite = (
                not_finite
                if self._not_finite is None
                else self._not_finite | not_finite.to(self._not_finite.device)
            )
            self._checked_losses += 1
            if self._checked_losses % CHECK_EVERY_STEPS:
                return
            not_finite, self._not_finite = self._not_finite, None
        if bool(not_finite):
            self.page[Slot.NOT_FINITE] = self.page[Slot.STEPS] + 1
            raise SystemExit(NotFinite.exit_code)


def install(folder: str) -> None:
    global _installed
    if _installed is None:
        _installed = HeartbeatWriter(folder)
        _installed.install()


def failed(error: BaseException) -> None:
    """Report the exception that ends this process. Raises nothing."""
    if _installed is None:
        return
    try:
        import traceback
        from pathlib import Path

        from flatout.job.folder import write_json

        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        report = {
            "pid": os.getpid(),
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "message": str(error)[:2000],
            "places": places[-60:],
        }
        write_json(Path(_installed.folder, f"failed.{os.getpid()}"), report)
    except Exception:
        return


# The counters: three hooks in the program's thread, for the steps of a process, its samples, and its waiting for data.
#
# The hooks are installed once, for the record of a run (`agent/run_summary.py`) and for the heartbeat. Where a step
# ends is decided as everywhere (`agent/steps.py`). The hook on backward passes goes once an optimizer steps, unless a
# heartbeat needs it.

SAMPLED_STEPS = 64  # whose batches are looked at, for the samples of a step
MAX_DEPTH = 3
_process_counters: StepCounters | None = None


def counters(torch: ModuleType) -> StepCounters:
    """Return the counters of this process. The first call installs their hooks."""
    global _process_counters
    if _process_counters is None:
        _process_counters = StepCounters()
        _process_counters.install(torch, Ledger())
    return _process_counters


AT_STEP: dict[int, Callable[[], None]] = {}  # called once, when this many steps were counted


class StepCounters:
    """``steps`` of the optimizers, or backward passes without one, and the nanoseconds that they waited for data (``waited_ns``).

    ``page`` is the heartbeat's, if there is one. ``on_losses`` is called before each backward pass then."""

    def __init__(self) -> None:
        self.page: Any = None
        self.on_losses: Callable[[Any], None] | None = None
        self.boundaries = StepBoundaries()
        self._in_backward = False
        self._backward_hook = Ledger()
        self.begin()

    def begin(self, steps: int = 0) -> None:
        """Count from here on, after ``steps`` steps."""
        self.steps, self.waited_ns = steps, 0
        self.first_ns = self.last_ns = self.first_step = 0  # when the first and the last counted step ended
        self.on_first_step: Callable[[], None] = lambda: None  # called when the first step is counted
        self._step_samples: list[int] = []  # of each of the first steps
        self._fetched_samples = 0
        self._backward_steps = 0  # backward passes that were counted before an optimizer stepped

    @property
    def samples_a_step(self) -> float:
        """The median over the first steps, so that an evaluation between two of them does not count."""
        return median(self._step_samples) if self._step_samples else 0.0

    def install(self, torch: ModuleType, ledger: Ledger) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        ledger.on_restore(
            "optimizer step hook", register_optimizer_step_post_hook(self._after_optimizer_step).remove
        )
        wrap_loader_method(torch, "batch", self._wrap_next, ledger)
        self._backward_hook.set(
            torch.autograd, "backward", self._wrap_backward(torch.autograd.backward, torch.autograd)
        )

    def _after_optimizer_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._backward_steps:  # the backward passes until now were no steps
            if self.page is not None:
                self.page[Slot.STEPS] = max(0, self.page[Slot.STEPS] - self._backward_steps)
            self.steps, self.first_ns, self._backward_steps = self.steps - self._backward_steps, 0, 0
        if self.boundaries.optimizer_stepped(id(optimizer)):
            self._count()
        elif self.page is not None:
            self.page[Slot.HEARTBEATS] += 1

    def _count(self) -> None:
        if not self.first_ns:
            self.first_step = self.steps + 1
            on_first_step, self.on_first_step = self.on_first_step, lambda: None
            on_first_step()
            self.first_ns = HostClock.mark()
        self.steps += 1
        if self.page is not None:
            self.page[Slot.STEPS] += 1
        self.last_ns = HostClock.mark()
        if self.steps in AT_STEP:
            AT_STEP.pop(self.steps)()
        if self.steps <= SAMPLED_STEPS and self._fetched_samples:
            self._step_samples.append(self._fetched_samples)
            self._fetched_samples = 0

    def _wrap_backward(self, backward: Callable[..., Any], autograd: ModuleType) -> Callable[..., Any]:
        @wraps(backward)
        def hooked_backward(tensors: Any, *args: object, **kwargs: object) -> Any:
            if self._in_backward:  # reentrant checkpointing calls it inside itself
                return backward(tensors, *args, **kwargs)
            page, counts_as_step = self.page, not self.boundaries.optimizer_seen
            if page is not None:
                page[Slot.BACKWARDS] += 1
                if self.on_losses is not None:
                    self.on_losses(tensors)
            if not counts_as_step:
                if page is None and autograd.backward is hooked_backward:  # nothing wraps it
                    self._backward_hook.restore()
                return backward(tensors, *args, **kwargs)
            self._in_backward = True
            try:
                result = backward(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
            self._backward_steps += 1
            self._count()
            return result

        return hooked_backward

    def _wrap_next(self, original_next: Callable[..., Any]) -> Callable[..., Any]:
        mark = HostClock.mark

        def next_counted(iterator: object) -> Any:
            start = mark()
            try:
                batch = original_next(iterator)
            finally:
                self.waited_ns += mark() - start
            if self.page is not None:
                self.page[Slot.BATCHES] += 1
            if self.steps < SAMPLED_STEPS:
                self._fetched_samples += _size(batch)
            return batch

        return next_counted


def _size(batch: object, depth: int = 0) -> int:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if depth > MAX_DEPTH:
        return 0
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for part in parts if (size := _size(part, depth + 1))), 0)
