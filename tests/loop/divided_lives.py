"""Runs of trainings whose model is parallelised over ranks, forked from one process that has torch.

Some are whole; others are interrupted and resumed. Runs the kinds of its arguments (KINDS) and prints the results
as JSON.
"""

import hashlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flatout
from flatout.schema.errors import FlatoutError

SAMPLES, BATCH = 24, 12


def network():
    flatout.seed(0)
    layers = {
        "body": nn.Linear(6, 10),
        "drop": nn.Dropout(0.2),
        "up": nn.Linear(10, 14),
        "act": nn.GELU(),
        "down": nn.Linear(14, 10),
        "head": nn.Linear(10, 3),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model.double()


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def loop_of(kind, folder, rank, ranks, dropout=0.2, beside=False, **more):
    """``fsdp``: sharded weights and samples; ``single``: one process with all shares.

    ``beside``: a second optimizer.
    """
    model = network()
    model.drop.p = dropout
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, torch.arange(SAMPLES) % 3)
    if kind == "fsdp":
        for layer in (model.body, model.up, model.down, model.head, model):
            fully_shard(layer)
    sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, BATCH // ranks, sampler=sampler)
    return flatout.Loop(
        model,
        optimizer,
        loss_fn,
        loader,
        epochs=5,
        clip=0.5,
        checkpoint_dir=folder,
        save_every=1,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
        **more,
        extra_state={"momentum": torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)}
        if beside
        else None,
    )


def digest(loop):
    """A digest of everything that this rank holds."""
    found = hashlib.sha256()
    optimizers = [loop.optimizer, *loop._saving.kept.also.values()]
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
    ]
    for tensor in [*loop.parameters, *states]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found.update(repr([loop.scheduler.get_last_lr(), torch.get_rng_state().tolist()]).encode())
    return found.hexdigest()


def lived(kind, folder, rank, ranks, until, change, more):
    try:
        loop = loop_of(kind, folder, rank, ranks, **more)
    except FlatoutError as error:
        return {"refused": str(error)}
    for step in loop:
        for optimizer in loop._saving.kept.also.values():
            optimizer.step()
        if change is not None:
            change(loop, step, rank)
        if step.index == until:
            break
    resumed = loop.resumed
    return {
        "digest": digest(loop),
        "index": loop.index,
        "exact": resumed.exact if resumed else None,
        "said": resumed.sentences() if resumed else [],
    }


def live(kind, folder, ranks, until=None, change=None, **more):
    """The report of each rank."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(os.open(scratch / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
                if ranks > 1:
                    distributed.init_process_group(
                        "gloo", init_method=f"file://{scratch / 'store'}", rank=rank, world_size=ranks
                    )
                (scratch / f"{rank}").write_text(
                    json.dumps(lived(kind, folder, rank, ranks, until, change, more))
                )
                if ranks > 1:
                    distributed.barrier()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(
            f"{kind}: exit codes {codes}\n"
            + "\n".join((scratch / f"{rank}.err").read_text()[-2500:] for rank in range(ranks))
        )
    return [json.loads((scratch / f"{rank}").read_text()) for rank in range(ranks)]


def spoil(loop, step, rank):
    """Sets a weight that only the second rank has to NaN."""
    if step.index == 2 and rank == 1:
        with torch.no_grad():
            loop.parameters[2].to_local().view(-1)[0] = float("nan")


def interrupted_twice(at, kind):
    for until in (2, 6):
        live(kind, at / kind, 2, until, beside=True)
    return {
        "gone on": live(kind, at / kind, 2, beside=True),
        "whole": live(kind, at / f"{kind} whole", 2, beside=True),
    }


def other_ranks(at, kind):
    """What one process says of the checkpoints of two ranks."""
    live("fsdp", at / kind, 2, until=2)
    return live("single", at / kind, 1)


def spoiled(at, kind):
    live("fsdp", at / "spoiled", 2, until=5, change=spoil, on_nan="ignore")
    return sorted(path.name for path in (at / "spoiled").glob("step-*"))


KINDS = {
    "fsdp": interrupted_twice,
    "other ranks": other_ranks,
    "spoiled": spoiled,
}


def main(kinds):
    torch.set_num_threads(1)
    torch.optim.AdamW(network().parameters())  # the imports of every run
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps({kind: KINDS[kind](Path(name), kind) for kind in kinds}))


main(sys.argv[1:])
