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
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._stepping: list[int] = []  # outermost first

    @property
    def alive(self) -> list[Any]:
        return [optimizer for ref in self._refs.values() if (optimizer := ref()) is not None]

    @property
    def stepping(self) -> bool:
        return bool(self._stepping)

    def observe(self, ledger: Ledger, step_hooks: Ledger, context: Any) -> None:
        """Report each outermost step to ``context`` until ``step_hooks`` is restored, new optimizers until ``ledger`` is."""
        from torch.optim import optimizer as torch_optimizer

        def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not context.paused and self._enter(optimizer):
                context.optimizer_begins(optimizer)

        def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not context.paused and self._exit(optimizer):
                context.optimizer_ends(optimizer)

        step_hooks.on_restore(
            "optimizer step hook", torch_optimizer.register_optimizer_step_pre_hook(before_step).remove
        )
        step_hooks.on_restore(
            "optimizer step hook", torch_optimizer.register_optimizer_step_post_hook(after_step).remove
        )
        ledger.set(
            torch_optimizer.Optimizer,
            "__init__",
            self._wrap_init(torch_optimizer.Optimizer.__init__, context),
        )

    def _wrap_init(self, init: Callable[..., Any], context: Any) -> Callable[..., Any]:
        @wraps(init)
        def hooked_init(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
            init(optimizer, *args, **kwargs)
            if not context.paused:
                self.register(optimizer)

        return hooked_init

    def register(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        boundaries, refs = self._boundaries, self._refs

        def deleted(_: object) -> None:
            boundaries.optimizer_deleted(key)
            refs.pop(key, None)

        refs[key] = weakref.ref(optimizer, deleted)
        boundaries.optimizer_created(key)

    def _enter(self, optimizer: Optimizer) -> bool:
        self._pop(optimizer)  # a step that raised left its entry behind
        self._stepping.append(id(optimizer))
        return len(self._stepping) == 1

    def _exit(self, optimizer: Optimizer) -> bool:
        self._pop(optimizer)
        if self._stepping:  # the inner optimizer of a wrapper: only the wrapper counts
            self._boundaries.optimizer_deleted(id(optimizer))
            self._refs.pop(id(optimizer), None)
            return False
        if id(optimizer) not in self._refs:
            self.register(optimizer)
        return True

    def _pop(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]

    def ignore_wrappers_of(self, optimizer: Optimizer) -> None:
        """Do not wait for a wrapper that shares the parameter groups: it may never step itself.

        SAM, for example, has two methods of its own, and its inner optimizer steps.
        """
        groups = {id(group) for group in optimizer.param_groups}
        for wrapper in self.alive:
            if wrapper is not optimizer and any(id(group) in groups for group in wrapper.param_groups):
                self._boundaries.optimizer_deleted(id(wrapper))
