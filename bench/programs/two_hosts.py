"""A small training over ranks by torch's own means (DDP over gloo), which reads FLATOUT_* and resumes.

Arguments: a folder that all ranks can access, and the number of steps. Each rank writes a line a step; rank 0
saves a checkpoint every fifth step. The group keeps torch's own timeout of half an hour, so it ends no wait
here.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flatout.distributed.rendezvous import store
from flatout.job.rank_environment import RankEnvironment, this_rank

BATCH, WIDTH = 64, 384  # 1.3 MB of gradients a step
SAVE_STEPS = 5


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    here = this_rank() or RankEnvironment(0, 0, 1, 1, f"file://{folder}/alone")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=store(torch, here, 60.0), rank=here.rank, world_size=here.world_size
    )
    torch.manual_seed(0)
    raw = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
    first, saved = 0, folder / "saved.pt"
    if saved.exists():
        last = torch.load(saved, weights_only=True)
        raw.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
        first = last["step"]
    model = DistributedDataParallel(raw)
    share = slice(here.rank * BATCH // here.world_size, (here.rank + 1) * BATCH // here.world_size)
    with (folder / f"steps{here.rank}.jsonl").open("a", encoding="utf-8") as out:
        for step in range(first, steps):
            drawn = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, WIDTH, generator=drawn)
            optimizer.zero_grad()
            loss = (model(x[share]) - x[share].sum(1, keepdim=True) / WIDTH**0.5).square().mean()
            loss.backward()
            optimizer.step()
            out.write(
                json.dumps(
                    {
                        "at": time.monotonic(),
                        "step": step,
                        "world": here.world_size,
                        "loss": loss.item(),
                        "rendezvous": here.rendezvous,
                    }
                )
                + "\n"
            )
            out.flush()
            if here.rank == 0 and (step + 1) % SAVE_STEPS == 0:
                torch.save(
                    {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                    folder / "saving.pt",
                )
                os.replace(folder / "saving.pt", saved)
    if here.rank == 0:
        weights = torch.cat([each.detach().flatten() for each in raw.parameters()])
        (folder / "weights.json").write_text(
            json.dumps(
                {
                    "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16],
                    "world": here.world_size,
                }
            )
        )
        torch.save(weights, folder / "weights.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
