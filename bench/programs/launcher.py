"""A rank of bench/launcher.py: it trains for ever, or fails on one rank.

``launcher.py train`` trains for ever with a loader worker, ``launcher.py fail VICTIM KIND MOMENT FOLDER``
fails on one rank. The ranks use FLATOUT_RANK and a rendezvous file directly, so that only the launcher is
measured.
"""

import os
import signal
import sys
import time
from pathlib import Path

RANK, WORLD = int(os.environ["FLATOUT_RANK"]), int(os.environ["FLATOUT_WORLD_SIZE"])


def join():
    import torch
    from torch import distributed

    path = os.environ["FLATOUT_RENDEZVOUS"].removeprefix("file://")
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(path, WORLD), rank=RANK, world_size=WORLD
    )
    return torch, distributed


def fail(kind, folder):
    Path(folder, "failed_at").write_text(str(time.monotonic()))
    if kind == "exit":
        sys.exit(3)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"the bad sample of rank {RANK}")


def failing(victim, kind, moment, folder):
    """``moment`` is "early" (before the rendezvous: the others wait at the file) or a number of steps."""
    if moment == "early" and int(victim) == RANK:
        fail(kind, folder)
    torch, distributed = join()
    step = 0
    while True:
        if step == int(moment) and int(victim) == RANK:
            time.sleep(0.05)  # the others are inside the exchange by now
            fail(kind, folder)
        distributed.all_reduce(torch.ones(1000))
        step += 1


def training(folder):
    torch, distributed = join()
    loader = torch.utils.data.DataLoader(torch.arange(1 << 20), batch_size=8, num_workers=1)
    model = torch.nn.Linear(8, 1)
    for batch in loader:
        model(batch.float()).sum().backward()
        distributed.all_reduce(model.weight.grad)
        Path(folder, f"trains.{RANK}").touch()


if __name__ == "__main__":
    if sys.argv[1] == "fail":
        failing(*sys.argv[2:])
    else:
        training(sys.argv[2])
