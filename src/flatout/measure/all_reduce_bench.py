"""Measure an all-reduce between two processes: ``python -P -m flatout.measure.all_reduce_bench RANK RENDEZVOUS OUT``.

RENDEZVOUS is a file that does not exist yet, used for the rendezvous. Rank 0 writes the figure to OUT as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flatout.measure.bench import rate
from flatout.measure.clock import clock_for

TENSOR_BYTES = 32 * 2**20  # a bucket of DistributedDataParallel is 25 MiB


def main(rank: int, rendezvous: str, out: str) -> None:
    import torch
    import torch.distributed as dist

    several = torch.cuda.device_count() >= 2
    backend, device = ("nccl", "cuda") if several else ("gloo", "cpu")
    if several:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    tensor = torch.zeros(TENSOR_BYTES // 4, device=device)
    each = []
    clock = clock_for(torch, device)
    for _ in range(8):
        dist.barrier()
        start = clock.mark()
        dist.all_reduce(tensor)
        each.append(clock.elapsed_ms(start, clock.mark()))
    dist.destroy_process_group()
    if rank == 0:
        found = rate(
            "all_reduce_bytes_per_s",
            device,
            TENSOR_BYTES,
            each[1:],
            f"{backend}, 2 processes, {TENSOR_BYTES // 2**20} MiB of float32",
        )
        Path(out).write_text(json.dumps(found.to_json()), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
