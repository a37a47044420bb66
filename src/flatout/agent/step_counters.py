"""Counts the steps of a run, its samples, and its waiting for data: two hooks in the program's thread.

A third one counts backward passes until an optimizer steps; without one they are the steps (`agent/steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.measure.clock import HostClock
from flatout.measure.statistics import median

if TYPE_CHECKING:
    from torch.optim import Optimizer

SAMPLED_STEPS = 64  # whose batches are looked at, for the samples of a step
DEEPEST = 3


class StepCounters:
    """``steps`` of the first optimizer, or backward passes without one, and the nanoseconds that they waited for data (``waited_ns``)."""

    def __init__(self) -> None:
        self.steps = self.waited_ns = 0
        self.first_ns = self.last_ns = self.first_step = 0  # when the first and the last counted step ended
        self.known_samples = 0.0  # of a step, if they were counted otherwise
        self.at_first: Callable[[], None] = lambda: None  # called when the first step is counted
        self._counted: int | None = None
        self._samples: list[int] = []  # of each of the first steps
        self._fetched = 0
        self._before = 0  # steps when the counting began
        self._in_backward = False
        self._backwards = Ledger()

    @property
    def samples_a_step(self) -> float:
        """The median over the first steps, so that an evaluation between two of them does not count."""
        return self.known_samples or (median(self._samples) if self._samples else 0.0)

    def install(self, torch: ModuleType, ledger: Ledger) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        ledger.call("optimizer step hook", register_optimizer_step_post_hook(self._stepped).remove)
        iterator = torch.utils.data.dataloader._BaseDataLoaderIter
        ledger.set(iterator, "__next__", self._waited(iterator.__next__))
        self._before = self.steps
        self._backwards.set(torch.autograd, "backward", self._passed(torch.autograd.backward, torch.autograd))

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step; of several optimizers, only the first counts."""
        if self._counted is None:  # the backward passes until now were no steps
            self._counted, self.steps, self.first_ns = id(optimizer), self._before, 0
        if id(optimizer) == self._counted:
            self._count()

    def _count(self) -> None:
        if not self.first_ns:
            self.first_step = self.steps + 1
            begin, self.at_first = self.at_first, lambda: None
            begin()
            self.first_ns = HostClock.mark()
        self.steps += 1
        self.last_ns = HostClock.mark()
        if self.steps <= SAMPLED_STEPS and self._fetched:
            self._samples.append(self._fetched)
            self._fetched = 0

    def _passed(self, backward: Callable[..., Any], autograd: ModuleType) -> Callable[..., Any]:
        @wraps(backward)
        def hooked_backward(*args: object, **kwargs: object) -> Any:
            if (
                self._in_backward or self._counted is not None
            ):  # reentrant checkpointing calls it inside itself
                if autograd.backward is hooked_backward and not self._in_backward:  # nothing wraps it
                    self._backwards.restore()
                return backward(*args, **kwargs)
            self._in_backward = True
            try:
                result = backward(*args, **kwargs)
            finally:
                self._in_backward = False
            self._count()
            return result

        return hooked_backward

    def _waited(self, take: Callable[..., Any]) -> Callable[..., Any]:
        mark = HostClock.mark

        @wraps(take)
        def next_counted(iterator: object) -> Any:
            start = mark()
            try:
                batch = take(iterator)
            finally:
                self.waited_ns += mark() - start
            if self.steps < SAMPLED_STEPS:
                self._fetched += _size(batch)
            return batch

        return next_counted


def _size(batch: object, depth: int = 0) -> int:
    """The first dimension of the first tensor in a batch; 0 without one."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if depth > DEEPEST:
        return 0
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for part in parts if (size := _size(part, depth + 1))), 0)
