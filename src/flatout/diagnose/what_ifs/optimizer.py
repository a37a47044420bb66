"""What if updating the parameters cost nothing: the optimizer's step does nothing.

Hooks of the step are called all the same, and so is a closure, once, because forward and backward may live in it.
"""

from __future__ import annotations

from functools import update_wrapper
from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment


def applies(facts: Facts, scene: Any) -> Options | Skip:
    if not scene.optimizers:
        return Skip("the script updates its parameters without an optimizer object")
    if scene.closure_steps and scene.backwards_in_last_step > 1:
        return Skip("the optimizer runs forward and backward several times inside one step; without them there is no step")
    return Options((True,))


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    for optimizer in scene.optimizers:
        ledger.set(optimizer, "step", _idle(scene.torch, optimizer), new=True)
    return ledger.restore


def _idle(torch: Any, optimizer: Any) -> Any:
    from torch.optim import optimizer as hooks

    def step(closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        for hook in (*hooks._global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (closure,), kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for hook in (*optimizer._optimizer_step_post_hooks.values(), *hooks._global_optimizer_post_hooks.values()):
            hook(optimizer, (closure,), kwargs)
        return loss

    return update_wrapper(step, optimizer.step)  # a scheduler looks for its mark on the function


def code(value: Value) -> str:
    return "# optimizer.step()  # left out, to see how long a step takes without it"


LEVER = Lever("optimizer", Moment.STEP, Effect.CHANGES_MATH, applies, code, apply=apply, live=True, page=__doc__)
