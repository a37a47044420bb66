"""A small training for one device that saves and resumes by itself; flatout splits it over ranks.

Arguments: a folder that all hosts can access, and the number of steps. A line per step goes to steps.jsonl there.
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

BATCH, WIDTH = 64, 384  # 1.3 MB of gradients a step
SAVE_STEPS = 5


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(1)
    loader = torch.utils.data.DataLoader(torch.randn(steps * BATCH, WIDTH, generator=drawn), batch_size=BATCH)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first, saved = 0, folder / "saved.pt"
    if saved.exists():
        last = torch.load(saved, weights_only=True)
        model.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
        first = last["step"]
    place = {"world": int(os.environ["FLATOUT_WORLD_SIZE"]), "rendezvous": os.environ["FLATOUT_RENDEZVOUS"]}
    with (folder / "steps.jsonl").open("a", encoding="utf-8") as out:
        for step, x in enumerate(loader):
            if step < first:
                continue
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True) / WIDTH**0.5).square().mean()
            loss.backward()
            optimizer.step()
            out.write(json.dumps({"at": time.monotonic(), "step": step, "loss": loss.item(), **place}) + "\n")
            out.flush()
            if (step + 1) % SAVE_STEPS == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                    folder / "saving.pt",
                )
                os.replace(folder / "saving.pt", saved)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    (folder / "weights.json").write_text(json.dumps({"digest": digest, "world": place["world"]}))


if __name__ == "__main__":
    main()
