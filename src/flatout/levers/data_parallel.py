"""Train a single-device program on several devices.

What it does: `flatout run --procs N` starts the program N times. Each rank runs all of it on its share of
    every training batch. After each backward pass, gradients are averaged, weighted by the size of each
    share, so the update is that of the whole batch. Parameters start equal. The script reads the loss of the
    whole batch, and every rank runs the complete evaluation. Only rank 0 prints and saves.
    `{reduction = "mean"}` or `"sum"` says how the loss is reduced; `batches` says where batches are split,
    `loaders` which DataLoaders train. `batchnorm` and `draws` say whether statistics and random numbers
    belong to each rank or to all. With `batches = "whole"` only the forward pass of the model is split, and
    the loss may relate samples to each other. Before the first run, a rehearsal compares some steps with
    those of one process and sets these options.
Why it is faster: the ranks compute their shares at the same time.
When it does not help: the batch is too small to split; exchanging the gradients takes longer than computing
    them; a device waits for a loader that all ranks share. `flatout scale` predicts this.
What it can change: rounding of sums. Random numbers inside a rank (dropout, augmentation) are other draws
    from the same distribution. Batch normalisation uses the statistics of each rank's share unless
    `--sync-batchnorm` is given.
Evidence: none in general; measured on your program by `bench/distributed.py` of the repository, and by
    `flatout tune --procs N`.
Sources: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"; torch
    documentation, "DistributedDataParallel".
"""

from flatout.distributed.division import ACCEPTED, why_not_split
from flatout.job.rank_environment import this_rank
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Number, Options, Skip, Table, Text, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

NAME = "data_parallel"


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    rank = this_rank()
    return (
        Options(({"reduction": "mean"},))
        if rank is not None and rank.world_size > 1
        else Skip(why_not_split(context.torch))
    )


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """Raises TypeError for an invalid value and LookupError without ranks."""
    from flatout.distributed.data_parallel import DataParallelScript
    from flatout.distributed.division import SplitSettings

    settings, rank = SplitSettings.read(value), this_rank()
    if rank is None or rank.world_size < 2:
        raise LookupError(why_not_split(context.torch))
    script = DataParallelScript(context.torch, context, rank, settings, ledger)
    script.install()
    ledger.set(context, "data_parallel", script)
    return ledger.restore


def code(value: Value) -> str:
    return (
        "torch.distributed.init_process_group()\nmodel = torch.nn.parallel.DistributedDataParallel(model)\n"
        "sampler = torch.utils.data.DistributedSampler(dataset)  # divide batch_size by the number of ranks; call sampler.set_epoch(epoch) in each epoch"
    )


LEVER = Lever(
    NAME,
    Moment.LOADER,
    Effect.RESAMPLED,
    applies,
    code,
    apply=apply,
    accepts=(
        Table(
            {
                **ACCEPTED,
                "loaders": (Number(0, 1000), Text(r"(\d+(, *\d+)*)?", "numbers separated by commas")),
            }
        ),
    ),
    page=__doc__,
)
