"""Use fewer threads inside each operation.

What it does: calls torch.set_num_threads(n) with n below the default.
Why it is faster: small operations spend more time waking threads than computing, and loader workers need
    cores too.
When it does not help: large convolutions and matrix products, which scale with the cores.
What it can change: rounding; sums are split differently.
Evidence: measured on your program before it is kept. On most programs the default is right.
Sources: PyTorch documentation, "CPU threading and TorchScript inference"; torch.set_num_threads.
"""

import os

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Number, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    current = context.torch.get_num_threads()
    if context.backwards and current != context.threads_at_import:
        return Skip(f"the program has already set the number of threads to {current}")
    if requested := facts.environment.get("OMP_NUM_THREADS"):
        return Skip(f"the environment sets OMP_NUM_THREADS={requested}; unset it to measure this lever")
    if current < 2:
        return Skip("torch already uses one thread in this process, and this lever only reduces threads")
    if context.device_type != "cpu":
        return Skip(f"the parameters are on {context.device_type}, where CPU threads do not compute")
    return Options(tuple(dict.fromkeys(n for n in (1, current // 2, current // 4) if 1 <= n < current)))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    before = context.torch.get_num_threads()
    context.torch.set_num_threads(int(value))  # type: ignore[arg-type]
    ledger.on_restore("torch.set_num_threads", lambda: context.torch.set_num_threads(before))
    return ledger.restore


def code(value: Value) -> str:
    return f"torch.set_num_threads({value})"


LEVER = Lever(
    "threads",
    Moment.IMPORT,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    live=True,
    sets_threads=True,
    accepts=(Number(1, os.cpu_count() or 1),),
    page=__doc__,
)
