"""What if Python never ran the garbage collector? The collector is switched off."""

import gc

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    return Options((True,)) if gc.isenabled() else Skip("the script has already disabled garbage collection")


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    if gc.isenabled():
        gc.disable()
        ledger.on_restore("gc.disable", gc.enable)
    return ledger.restore


def code(value: Value) -> str:
    return "gc.disable()  # and call gc.collect() where a pause does no harm"


LEVER = Lever("gc", Moment.STEP, Effect.CHANGES_MATH, applies, code, apply=apply, live=True, page=__doc__)
