"""Keeps the best loss so far.

fault: a comparison in Python waits for the loss in each step
codes: FL101
"""
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(8192, 80, device=device)
model = nn.Sequential(nn.Linear(80, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 80)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
best = torch.tensor(float("inf"), device=device)
for step in range(100_000):
    batch = x[torch.randint(len(x), (128,), device=device)]
    optimizer.zero_grad()
    loss = nn.functional.l1_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    if loss < best:  # ill!
        best = loss.detach()  # ill
    best = torch.minimum(best, loss.detach())  # well
    if step % 200 == 0:
        print(step, best.item())
