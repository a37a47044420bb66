"""A plain regression.

fault: the gradients of all steps so far are added up
codes: FL001
"""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(4096, 48)
y = x[:, :1] * 0.5 - x[:, 1:2]
model = nn.Sequential(nn.Linear(48, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for step in range(100_000):
    at = torch.randint(len(x), (128,))
    optimizer.zero_grad()  # well
    loss = nn.functional.mse_loss(model(x[at]), y[at])
    loss.backward()  # both!
    optimizer.step()  # both!
    if step % 500 == 0:
        print(step, loss.item())
