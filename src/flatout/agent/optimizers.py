"""Tracks the optimizers of a script; of nested steps, only the outermost counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.agent.steps import StepBoundaries

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Optimizers:
    """Weak references to optimizers, in creation order. ``boundaries`` is told of new and deleted ones."""

    def __init__(self, boundaries: StepBoundaries) -> None:
        self._boundaries = boundaries
        self._known: dict[int, weakref.ref[Any]] = {}
        self._stepping: list[int] = []  # outermost first

    @property
    def alive(self) -> list[Any]:
        return [optimizer for ref in self._known.values() if (optimizer := ref()) is not None]

    @property
    def stepping(self) -> bool:
        return bool(self._stepping)

    def observe(self, ledger: Ledger, every_step: Ledger, context: Any) -> None:
        """Report each outermost step to ``context`` until ``every_step`` is restored, new optimizers until ``ledger`` is."""
        from torch.optim import optimizer as torchs

        def begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not context.asleep and self._begins(optimizer):
                context.optimizer_begins(optimizer)

        def ends(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not context.asleep and self._ends(optimizer):
                context.optimizer_ends(optimizer)

        every_step.call("optimizer step hook", torchs.register_optimizer_step_pre_hook(begins).remove)
        every_step.call("optimizer step hook", torchs.register_optimizer_step_post_hook(ends).remove)
        ledger.set(torchs.Optimizer, "__init__", self._wrap_init(torchs.Optimizer.__init__, context))

    def _wrap_init(self, init: Callable[..., Any], context: Any) -> Callable[..., Any]:
        @wraps(init)
        def hooked_init(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
            init(optimizer, *args, **kwargs)
            if not context.asleep:
                self.meet(optimizer)

        return hooked_init

    def meet(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        boundaries, known = self._boundaries, self._known

        def gone(_: object) -> None:
            boundaries.optimizer_gone(key)
            known.pop(key, None)

        known[key] = weakref.ref(optimizer, gone)
        boundaries.optimizer_made(key)

    def _begins(self, optimizer: Optimizer) -> bool:
        self._leaves(optimizer)  # a step that raised left its entry behind
        self._stepping.append(id(optimizer))
        return len(self._stepping) == 1

    def _ends(self, optimizer: Optimizer) -> bool:
        self._leaves(optimizer)
        if self._stepping:  # the inner optimizer of a wrapper: only the wrapper counts
            self._boundaries.optimizer_gone(id(optimizer))
            self._known.pop(id(optimizer), None)
            return False
        if id(optimizer) not in self._known:
            self.meet(optimizer)
        return True

    def _leaves(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]

    def wait_for_no_wrapper_of(self, optimizer: Optimizer) -> None:
        """Do not wait for a wrapper that shares the parameter groups: it may never step itself.

        SAM, for example, has two methods of its own, and its inner optimizer steps.
        """
        groups = {id(group) for group in optimizer.param_groups}
        for wrapper in self.alive:
            if wrapper is not optimizer and any(id(group) in groups for group in wrapper.param_groups):
                self._boundaries.optimizer_gone(id(wrapper))
