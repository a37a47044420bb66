"""A regression that remembers its losses for a plot.

fault: the list keeps each loss with its graph
codes: FL202
"""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(8192, 64)
y = x[:, :2].prod(1, keepdim=True)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []

for step in range(20_000):
    at = torch.randint(len(x), (128,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[at]), y[at])
    loss.backward()
    optimizer.step()
    losses.append(loss)  # ill!
    losses.append(loss.detach())  # well
    if step % 500 == 499:
        print(step + 1, torch.stack(losses[-500:]).mean().item())
