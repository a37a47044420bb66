"""A script that trains under torchrun.

It writes a digest of its weights after each step to OUT/seen.<rank>, and its first loss to OUT/first.<rank>.

    torchrun --nproc-per-node 2 ddp_training.py OUT STEPS [cuda] [keeps]

STEPS of -1 means no end; "keeps" keeps the gradients of each step until the next.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
rank, steps = torch.distributed.get_rank(), int(sys.argv[2])
device = torch.device("cuda", rank) if "cuda" in sys.argv else torch.device("cpu")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            torch.nn.Tanh(),
            torch.nn.Linear(32, 32),
            torch.nn.Tanh(),
            torch.nn.Linear(32, 1),
        )
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.body(x) * self.scale[0]


torch.manual_seed(0)
model = DistributedDataParallel(
    Net().to(device), bucket_cap_mb=0.003, device_ids=[device] if device.type == "cuda" else None
)
optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.01)
source, seen = (
    torch.Generator().manual_seed(rank),
    os.open(f"{sys.argv[1]}/seen.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
)
kept = loss = None
while steps:
    steps -= 1
    first = loss is None
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16, generator=source).to(device)).square().mean()
    loss.backward()
    kept = [p.grad for p in model.parameters()] if "keeps" in sys.argv else None
    if first:
        Path(f"{sys.argv[1]}/first.{rank}").write_text(loss.item().hex())
        time.sleep(0.0 if rank else 0.5)  # rank 0 ends its first step last
    optimizer.step()
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    os.write(seen, f"{hashlib.sha256(weights).hexdigest()[:12]} ".encode())
os._exit(0)  # gloo may end a process that exits by itself
