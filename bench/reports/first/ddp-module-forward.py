"""A program of a public report.

fault: The forward pass runs through the unwrapped ddp.module, so DistributedDataParallel never averages gradients and the ranks drift apart.
link: https://github.com/jingyaogong/minimind/issues/853
says: (?is)(\.module\b|ddp|distributed ?data ?parallel|unwrapped|wrapper).{0,300}(bypass|forward|sync|all[- ]?reduc|averag|diverg|never|around|not called)|(ranks?|replicas?|process(es)?).{0,300}(differ|diverg|not (sync|averag|reduc|equal)|drift|unequal|disagree|apart)|gradients?.{0,200}(not|never) (sync|averag|all[- ]?reduc|reduc|shared)
kind: correctness
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2400, 12, generator=g)
    y = (x @ torch.randn(12, 5, generator=g)).argmax(1)
    return x, y


def worker(rank, world, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    x_all, y_all = make_data()
    x, y = x_all[rank:400:world], y_all[rank:400:world]       # each rank its own shard
    x_val, y_val = x_all[400:], y_all[400:]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 5)))  # both!
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    net = model.module if isinstance(model, DistributedDataParallel) else model  # both!
    for epoch in range(12):
        net.train()
        for idx in torch.randperm(len(x)).split(25):
            logits = net(x[idx])  # ill!
            logits = model(x[idx])  # well
            loss = nn.functional.cross_entropy(logits, y[idx])
            optimizer.zero_grad()
            loss.backward()  # both!
            optimizer.step()  # both!
        if rank == 0 and epoch % 3 == 2:
            net.eval()
            with torch.no_grad():
                acc = (net(x_val).argmax(1) == y_val).float().mean().item()
            print(f"epoch {epoch}: loss {loss.item():.3f}  val acc {acc:.3f}", flush=True)
    print(f"rank {rank}: weight sum {sum(p.sum().item() for p in net.parameters()):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        mp.start_processes(worker, args=(2, os.path.join(d, "init")), nprocs=2, start_method="fork")
