"""A score network that is tested every few steps.

fault: the first test leaves the network in evaluation mode
codes: FL016
kind: performance
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def estimation(score, x, sigma):
    noise = torch.randn_like(x) * sigma
    return ((score(x + noise) * sigma + noise / sigma) ** 2).mean()


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.rand(4096, 3, 16, 16)), batch_size=64, shuffle=True)
tests = torch.rand(256, 3, 16, 16)
score = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ELU(), nn.Dropout(0.2), nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ELU(), nn.Conv2d(64, 3, 3, padding=1))
optimizer = torch.optim.Adam(score.parameters(), lr=1e-3)
step = 0
score.train()  # ill!
for epoch in range(1000):
    for (x,) in loader:
        score.train()  # well
        step += 1
        optimizer.zero_grad()
        loss = estimation(score, x, 0.1)  # ill!
        loss = estimation(score, x, 0.1)  # well
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            score.eval()  # ill!
            score.eval()  # well
            with torch.no_grad():
                print(step, loss.item(), estimation(score, tests, 0.1).item())
