"""Suspend an optimizer for a while, so that the weights of a running program do not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from flatout.schema.program import Ledger


def suspend_optimizer(torch: ModuleType, optimizer: Optimizer, ledger: Ledger) -> None:
    """Until the ledger is restored, this optimizer's step changes nothing.

    Hooks of the step still run. So does a closure, once, because it may contain forward and backward.
    """
    from torch.optim import optimizer as hooks

    def step(closure: Callable[[], Any] | None = None, *args: object, **kwargs: object) -> Any:
        for hook in (
            *hooks._global_optimizer_pre_hooks.values(),
            *optimizer._optimizer_step_pre_hooks.values(),
        ):
            hook(optimizer, (closure,), kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for hook in (
            *optimizer._optimizer_step_post_hooks.values(),
            *hooks._global_optimizer_post_hooks.values(),
        ):
            hook(optimizer, (closure,), kwargs)
        return loss

    ledger.set(
        optimizer, "step", update_wrapper(step, optimizer.step), new=True
    )  # a scheduler looks for its mark on the function
