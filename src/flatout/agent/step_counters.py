"""Counts the steps of a process, its samples, and its waiting for data: three hooks in the program's thread.

The hooks are installed once, for the record of a run (`agent/run_summary.py`) and for the heartbeat of a
supervised one (`agent/heartbeat.py`). Where a step ends is decided as everywhere (`agent/steps.py`). The hook on
backward passes goes once an optimizer steps, unless a heartbeat needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.agent.loader_methods import wrap_loader_method
from flatout.agent.steps import StepBoundaries
from flatout.job.heartbeat import Slot
from flatout.measure.clock import HostClock
from flatout.measure.statistics import median

if TYPE_CHECKING:
    from torch.optim import Optimizer

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
