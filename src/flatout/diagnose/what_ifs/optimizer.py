"""What if the parameter update cost nothing? The optimizer's step does nothing (guard/suspended_optimizer.py)."""

from flatout.guard.suspended_optimizer import suspend_optimizer
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not context.optimizers:
        return Skip("the script updates its parameters without an optimizer object")
    if context.closure_steps and context.backwards_in_last_step > 1:
        return Skip(
            "the optimizer runs forward and backward several times within one step; there is no step without it"
        )
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    for optimizer in context.optimizers:
        suspend_optimizer(context.torch, optimizer, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return "# optimizer.step()  # commented out, to see the step time without it"


LEVER = Lever(
    "optimizer", Moment.STEP, Effect.CHANGES_MATH, applies, code, apply=apply, live=True, page=__doc__
)
