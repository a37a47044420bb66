"""Trains the given cases, as one process or as a rank, and records the results.

    python train_cases.py CASES.json OUT

Writes OUT/<case>.<rank>.json: gradients of the first step, losses, final weights, samples of each epoch.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.distributed.data_parallel import DataParallelScript
from flatout.distributed.division import SplitSettings
from flatout.job.rank_environment import this_rank


class Numbered(torch.utils.data.Dataset):
    """Each sample knows its number; ``seen`` are the samples fetched in this process."""

    def __init__(self, length, dtype):
        draw = torch.Generator().manual_seed(1)
        self.x, self.y = (
            torch.randn(length, 6, generator=draw, dtype=dtype),
            torch.randint(0, 3, (length,), generator=draw),
        )

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def loss_of(out, y, kind):
    if kind == "contrast":  # every sample is compared with all others
        z = nn.functional.normalize(out)
        return nn.functional.cross_entropy(5 * z @ z.t(), torch.arange(len(z)))
    return nn.functional.cross_entropy(out, y, reduction=kind)


def train(case):
    torch.manual_seed(case["seed"])
    dtype = getattr(torch, case["dtype"])
    data = Numbered(case["length"], dtype)
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=case["batch"],
        shuffle=case["shuffle"],
        drop_last=case["drop_last"],
        num_workers=case["workers"],
    )
    between = [nn.BatchNorm1d(8)] if case["batchnorm"] else []
    body = nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Dropout(case["dropout"])).to(dtype)
    head, unused = nn.Linear(8, 3).to(dtype), nn.Linear(8, 3).to(dtype)
    model = nn.ModuleDict({"body": body, "head": head, "unused": unused})
    make = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
        "adam": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    }[case["optimizer"]]
    optimizers = (
        [make(body.parameters()), make(head.parameters())] if case["two"] else [make(model.parameters())]
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9) for optimizer in optimizers]
    found = {"gradients": None, "losses": [], "epochs": []}
    steps = 0
    while steps < case["steps"]:
        found["epochs"].append([])
        for at, (x, y, numbers) in enumerate(loader):
            found["epochs"][-1].append(numbers.tolist())
            loss = loss_of(head(body(x)), y, case["loss"])
            (loss if case["window"] == 1 else loss / case["window"]).backward()
            if case["window"] == 1:
                found["losses"].append(loss.item())
            if (at + 1) % case["window"] and at + 1 < len(loader):
                continue
            if case["clip"]:
                nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
            if found["gradients"] is None:
                found["gradients"] = [
                    p.grad.flatten().tolist() for p in (*body.parameters(), *head.parameters())
                ]
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            steps += 1
            if steps == case["steps"]:
                break
    assert all(p.grad is None for p in unused.parameters())
    found["weights"] = [
        p.detach().double().flatten().tolist() for p in (*model.parameters(), *model.buffers())
    ]
    return found


def main():
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    place = this_rank()
    for at, case in enumerate(cases):
        ledger = Ledger()
        context = TrainingContext(torch, Listener(), ledger)
        context.install()
        if place is not None:
            here = replace(place, rendezvous=f"{place.rendezvous}{at}")
            DataParallelScript(torch, context, here, SplitSettings.read(case["division"]), ledger).install()
        found = train(case)
        ledger.restore()
        (out / f"{at}.{here.rank if place is not None else 'plain'}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    os._exit(0)  # workers of loaders end with it
