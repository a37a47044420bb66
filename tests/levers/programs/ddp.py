"""DistributedDataParallel over gloo, started by torchrun."""

import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
