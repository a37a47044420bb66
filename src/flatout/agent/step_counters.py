"""Counts the steps of a run, its samples, and its waiting for data: two hooks in the program's thread."""

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
    """``steps`` of the first optimizer, and the nanoseconds that they waited for data (``waited_ns``)."""

    def __init__(self) -> None:
        self.steps = self.waited_ns = 0
        self.first_ns = self.last_ns = self.first_step = 0  # when the first and the last counted step ended
        self.known_samples = 0.0  # of a step, if they were counted otherwise
        self.at_first: Callable[[], None] = lambda: None  # called when the first step is counted
        self._counted: int | None = None
        self._samples: list[int] = []  # of each of the first steps
        self._fetched = 0

    @property
    def samples_a_step(self) -> float:
        """The median over the first steps, so that an evaluation between two of them does not count."""
        return self.known_samples or (median(self._samples) if self._samples else 0.0)

    def install(self, torch: ModuleType, ledger: Ledger) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        ledger.call("optimizer step hook", register_optimizer_step_post_hook(self._stepped).remove)
        iterator = torch.utils.data.dataloader._BaseDataLoaderIter
        ledger.set(iterator, "__next__", self._waited(iterator.__next__))

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step; of several optimizers, only the first counts."""
        if self._counted is None:
            self._counted, self.first_step = id(optimizer), self.steps + 1
            self.at_first()
            self.first_ns = HostClock.mark()
        if id(optimizer) == self._counted:
            self.steps += 1
            self.last_ns = HostClock.mark()
            if self.steps <= SAMPLED_STEPS and self._fetched:
                self._samples.append(self._fetched)
                self._fetched = 0

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
