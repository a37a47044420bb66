"""Two ranks that train one model, case by case in one pair of processes: ``two_ranks.py RANK FOLDER``.

Writes FOLDER/RANK.json. In the last case, rank 1 runs out of memory and ends.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flatout import Loop
from flatout.schema.errors import LoopError

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
STEPS, SAMPLES = 3, 8


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_count(model, batch):
    """The mean over the samples that are not of class 2; the last micro-batches have none."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=2), (batch[1] != 2).sum()


def data(dtype):
    generator = torch.Generator().manual_seed(RANK)
    batches = [
        (
            torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (SAMPLES,), generator=generator),
        )
        for _ in range(STEPS)
    ]
    for _, classes in batches[:2]:
        classes[-2:] = 2
    return batches


def train(loss=loss_fn, dtype=torch.float64, unused=False, sharded=False, **more):
    """Weights, the split of each step, and the error that ended the training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    if sharded:
        for module in (model[0], model[2], model):
            fully_shard(module)
        parallel = model
    else:
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.001, find_unused_parameters=unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps, error = [], ""
    try:
        loop = Loop(parallel, optimizer, loss, data(dtype), **more)
        steps.extend(loop)
    except LoopError as raised:
        error = str(raised)
    return {
        "weights": [
            (p.full_tensor() if sharded else p).detach().double().flatten().tolist()
            for p in model.parameters()
        ],
        "parts": [step.parts for step in steps],
        "skipped": [bool(step.skipped) for step in steps],
        "error": error,
    }


def on_rank_1(number, what):
    """A loss that ``what`` changes in one call on rank 1."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        found = loss_fn(model, batch)
        return what(found) if RANK == 1 and len(calls) == number else found

    return loss


def no_memory(loss):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


distributed.init_process_group(
    "gloo", init_method=f"file://{FOLDER / 'store'}", rank=RANK, world_size=2, timeout=timedelta(seconds=30)
)
results = {
    "whole": train(),
    "divided": train(micro_batch=4),
    "counted, whole": train(loss=by_count),
    "counted": train(loss=by_count, micro_batch=2),
    "counted, unused": train(loss=by_count, micro_batch=2, unused=True),
    "auto": train(micro_batch="auto"),
    "sharded": train(sharded=True),
    "sharded, stored": train(sharded=True, checkpoint_dir=FOLDER / "saves"),
    "fp16": train(
        loss=on_rank_1(4, lambda loss: loss * 1e30),
        precision="fp16",
        dtype=torch.float32,
        micro_batch=4,
        reduction="mean",
    ),
}
distributed.barrier()
try:
    results["memory"] = train(loss=on_rank_1(2, no_memory))
except RuntimeError as lost:
    results["memory"] = {"error": f"lost: {lost}"}
(FOLDER / f"{RANK}.json").write_text(json.dumps(results))
