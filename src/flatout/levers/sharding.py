"""Shard weights, gradients and optimizer state over the ranks, for models that do not fit on one device.

What it does: under `flatout run --procs N` or `--gpus N`, each rank stores 1/N of every weight, of its
    gradient and of its optimizer state. The weights of a block are gathered when it computes and freed
    afterwards; its gradient is sharded as soon as it exists (torch's FSDP2, `fully_shard`). The script does
    not change, and neither do its checkpoints: they hold whole tensors and are interchangeable with those of
    one process. Over several machines, weights are sharded inside each machine and replicated across
    machines; `{over = "all"}` shards them over all ranks.
Why it is faster: it is not; it saves memory. It can pay off if a model then fits, or a larger batch.
When it does not help: activations fill the memory (see `recompute`); one block holds most of the weights; the
    model does not fit even without gradients and optimizer state, because the script creates the whole model
    before it is sharded.
What it can change: rounding of sums, in addition to the changes of `data_parallel`. `state_dict()` returns
    copies, not the live weights. If a script changes a weight through a view of some of its rows
    (`weight[3].zero_()`), the entries do not change; `weight[3] = 0` works.
Evidence: 0.51 of the bytes of weights, gradients and optimizer state on each of two ranks (AdamW, CPU, torch
    2.14.1). It is never chosen for speed, so its time is not measured on your program:
    `flatout run --shard auto` uses it if these bytes do not fit.
Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; Zhao
    et al. 2023, "PyTorch FSDP"; torch documentation, "torch.distributed.fsdp.fully_shard".
"""

from flatout.distributed.division import why_not_split
from flatout.job.rank_environment import this_rank
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Table, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

NAME = "sharding"
SCOPES = ("node", "all")


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    rank = this_rank()
    if rank is None or rank.world_size < 2:
        return Skip(why_not_split(context.torch))
    if not context.torch.distributed.is_available():
        return Skip("this torch was built without torch.distributed")
    return Options(({"over": "node"},))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """Raises LookupError without `data_parallel`."""
    from flatout.distributed.sharding import Sharding
    from flatout.levers.recompute import repeated

    settings = {} if value is True else value
    assert isinstance(settings, dict)
    scope = settings.get("over", "node")
    parallel, rank = context.data_parallel, this_rank()
    if parallel is None or rank is None:
        raise LookupError("sharding requires data_parallel, which is not applied")
    ledger.set(
        parallel,
        "sharding",
        Sharding(
            context.torch,
            context,
            parallel.env,
            str(scope),
            lambda module: repeated(context.torch, module),
            ledger,
        ),
    )
    return ledger.restore


def code(value: Value) -> str:
    return (
        "from torch.distributed.fsdp import fully_shard\n"
        "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)  # before the optimizer is made\n"
        "# checkpoints: get_state_dict and set_state_dict of torch.distributed.checkpoint.state_dict, with full_state_dict=True"
    )


LEVER = Lever(
    NAME,
    Moment.LOADER,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    after=("data_parallel",),
    needs=("data_parallel",),
    accepts=(Table({"over": SCOPES}),),
    page=__doc__,
)
