"""What if the parameter update cost nothing? The optimizer's step does nothing (engine/idle.py)."""

from __future__ import annotations

from typing import Any

from flatout.engine.idle import idle
from flatout.plan.facts import Facts
from flatout.plan.lever import Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment


def applies(facts: Facts, scene: Any) -> Options | Skip:
    if not scene.optimizers:
        return Skip("the script updates its parameters without an optimizer object")
    if scene.closure_steps and scene.backwards_in_last_step > 1:
        return Skip("the optimizer runs forward and backward several times within one step; there is no step without it")
    return Options((True,))


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    for optimizer in scene.optimizers:
        idle(scene.torch, optimizer, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return "# optimizer.step()  # commented out, to see the step time without it"


LEVER = Lever("optimizer", Moment.STEP, Effect.CHANGES_MATH, applies, code, apply=apply, live=True, page=__doc__)
