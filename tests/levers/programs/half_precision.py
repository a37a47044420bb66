"""A small network in bfloat16 with batches from a loader, which flatout starts as two ranks."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).to(
    torch.bfloat16
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, 8, dtype=torch.bfloat16))
loader = torch.utils.data.DataLoader(data, batch_size=8)
while True:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
