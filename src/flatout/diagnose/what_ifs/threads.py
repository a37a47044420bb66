"""What if operations used one thread fewer, or one more?"""

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext


def _fewer(facts: Facts, context: TrainingContext) -> Options | Skip:
    threads = context.torch.get_num_threads()
    # If there are more threads than cores, try one thread per core.
    return (
        Options((min(threads - 1, facts.cores),))
        if threads > 1
        else Skip("the program already uses one thread")
    )


def _more(facts: Facts, context: TrainingContext) -> Options | Skip:
    threads = context.torch.get_num_threads()
    return (
        Options((threads + 1,))
        if threads < facts.cores
        else Skip(f"the program already uses all {facts.cores} cores")
    )


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    threads = context.torch.get_num_threads()
    context.torch.set_num_threads(int(value))  # type: ignore[arg-type]
    ledger.on_restore("torch.set_num_threads", lambda: context.torch.set_num_threads(threads))
    return ledger.restore


def code(value: Value) -> str:
    return f"torch.set_num_threads({value})"


FEWER, MORE = (
    Lever(
        name,
        Moment.STEP,
        Effect.CHANGES_MATH,
        applies,
        code,
        apply=apply,
        live=True,
        sets_threads=True,
        page=__doc__,
    )
    for name, applies in (("one thread fewer", _fewer), ("one thread more", _more))
)
