"""Give torch.compile a memory budget for activations; it recomputes those that do not fit.

What it does: sets the share of activation memory that torch.compile may keep between forward and backward
    pass: 1 keeps the fastest set, 0 almost nothing. Its partitioner chooses what to recompute. Acts through
    the lever compile.
Why it is faster: it is not; it saves memory. The compiler fuses recomputation into the kernels that need it,
    which costs less than a second pass.
When it does not help: models that are not compiled. A smaller budget does not always use less memory
    (pytorch#197838), so each value is measured.
What it can change: rounding, as compile does: recomputed values may be fused differently.
Evidence: measured on your program before it is kept: peak memory and time of each value.
Sources: torch._functorch.config.activation_memory_budget; pytorch.org/blog, "Current and new activation
    checkpointing techniques in PyTorch".
"""

from flatout.levers.reasons import COMPILED_ONCE, COMPILER_OFF, NO_ROOT
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Number, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

BUDGETS: tuple[Value, ...] = (0.7, 0.5, 0.3, 0.1)


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if off := context.compiler_off():
        return Skip(COMPILER_OFF.format(off=off))
    if context.compiled_by_script:
        return Skip("the script compiles the model or a part of it, before a budget could be set")
    if context.create_graph_seen:
        return Skip(COMPILED_ONCE)
    if not context.roots:
        return Skip(NO_ROOT)
    return Options(BUDGETS)


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    from torch._functorch import config

    dynamo = context.torch._dynamo
    # The option is read while compiling, so compiled code must be compiled again.
    ledger.on_restore("compiled code", dynamo.reset)
    ledger.set_flag(config, "activation_memory_budget", float(value))  # type: ignore[arg-type]
    dynamo.reset()
    return ledger.restore


def code(value: Value) -> str:
    return f"torch._functorch.config.activation_memory_budget = {value}  # before model.compile()"


LEVER = Lever(
    "memory_budget",
    Moment.MODEL,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    live=True,
    warms_up=True,
    after=("compile",),
    needs=("compile",),
    saves_memory=True,
    accepts=(Number(0, 1, integer=False),),
    page=__doc__,
)
