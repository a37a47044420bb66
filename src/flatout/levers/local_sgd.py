"""Let each rank take several steps alone before the ranks synchronise.

What it does: after some steps that exchange gradients ({warmup = 0}, at least two), each rank steps on its
    own share of every batch and exchanges nothing. After {every = 8} steps, the weights become the mean over
    all ranks ({outer = "average"}), or an outer optimizer with momentum updates them ({outer = "nesterov"}:
    DiLoCo, rate 0.7, momentum 0.9). The optimizer state (its moments) stays on each rank and is not
    exchanged. The ranks synchronise before an evaluation, state_dict(), torch.save and load_state_dict, and
    at the end of the program, so that all of them decide and save the same. If ranks take different numbers
    of steps, the program ends with an error. For a script's own DistributedDataParallel, the guide to ranks
    shows torch's post_localSGD_hook.
Why it is faster: one exchange replaces many.
When it does not help: exchanging gradients is a small part of a step (`flatout scale` shows it); the script
    runs its model without gradients in every step, which counts as an evaluation each time; loss scaling,
    where gradients are still exchanged. `--whole-batches` and `--sync-batchnorm` exchange data in every forward pass
    and are not supported.
What it can change: the maths, so you select it by name only. Weights of the ranks diverge between
    synchronisations, more so in longer rounds. The script reads the loss of its own share. Other code that
    reads weights between rounds (such as an average that the script keeps) reads those of its rank.
Evidence: loss curves compared with the synchronous run in `bench/exchange.py` of the repository. It is not
    measured on your program.
Sources: Stich 2018, "Local SGD Converges Fast and Communicates Little"; Lin et al. 2018, "Don't Use Large
    Mini-Batches, Use Local SGD" (warmup: post-local SGD); Douillard et al. 2023, "DiLoCo: Distributed
    Low-Communication Training of Language Models".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.distributed.absent import why_none
from flatout.schema.accepted import Number, Table
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from flatout.distributed.division import SplitSettings
    from flatout.schema.program import Ledger, TrainingContext

NAME = "local_sgd"
EXCHANGES = (
    "it does not work with {why} of data_parallel, which exchanges data between the ranks in forward passes"
)
LOSSES = "between rounds each rank reads the loss of its own share, so decide by an evaluation; each rank keeps its own optimizer state"


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.data_parallel is None:
        return Skip(why_none(context.torch))
    if why := _exchanges(context.data_parallel.division):
        return Skip(EXCHANGES.format(why=why))
    return Options(({"every": 8, "outer": "average"}, {"every": 8, "outer": "nesterov"}))


def _exchanges(division: SplitSettings) -> str:
    if division.batches == "whole":
        return 'batches = "whole"'
    return 'batchnorm = "all"' if division.batchnorm == "all" else ""


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """Raises LookupError if the ranks cannot step alone."""
    from flatout.distributed.local_steps import LocalSgdSettings, LocalSteps

    assert isinstance(value, dict)
    rounds = LocalSgdSettings(**value)
    if context.data_parallel is None:
        raise LookupError(why_none(context.torch))
    if why := _exchanges(context.data_parallel.division):
        raise LookupError(EXCHANGES.format(why=why))
    local = LocalSteps(context.data_parallel, rounds)
    local.install(ledger)
    ledger.set(context.data_parallel, "local", local)
    context.report(NAME, LOSSES)
    return ledger.restore


def code(value: Value) -> str:
    every = value.get("every", 8) if isinstance(value, dict) else 8
    if isinstance(value, dict) and value.get("outer") == "nesterov":
        return (
            "outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)  # shared: a copy of the model's parameters\n"
            f"if step % {every} == 0:\n    for p, s in zip(model.parameters(), shared):\n        s.grad = s.detach() - p.detach()\n"
            "        torch.distributed.all_reduce(s.grad, torch.distributed.ReduceOp.AVG)\n    outer.step()\n"
            "    for p, s in zip(model.parameters(), shared):\n        p.data.copy_(s)"
        )
    return (
        "from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager\n"
        f"averager = PeriodicModelAverager(period={every}, warmup_steps=100)\n"
        "optimizer = torch.distributed.optim.PostLocalSGDOptimizer(optimizer, averager)"
    )


LEVER = Lever(
    NAME,
    Moment.IMPORT,
    Effect.CHANGES_MATH,
    applies,
    code,
    apply=apply,
    needs=("data_parallel",),
    excludes=("sharding",),
    accepts=(
        Table(
            {
                "every": (Number(1, 10**6),),
                "outer": ("average", "nesterov"),
                "warmup": (Number(0, 10**9),),
            }
        ),
    ),
    page=__doc__,
)
