"""A deep regressor with a moving average of its weights.

fault: the average takes two operations a tensor where one does
codes: FL153 FL165 FL167
kind: performance
"""
from copy import deepcopy

import torch
from torch import nn


class Average:
    def __init__(self, model, momentum=0.001):
        self.module, self.momentum = deepcopy(model), momentum

    @torch.no_grad()
    def update(self, model):
        new = dict(model.named_parameters())
        for name, kept in self.module.named_parameters():  # ill!
        for name, kept in self.module.named_parameters():  # well
            kept.mul_(1 - self.momentum).add_(new[name], alpha=self.momentum)  # ill!
            kept.lerp_(new[name], self.momentum)  # well


torch.manual_seed(0)
x, y = torch.randn(4096, 64), torch.randn(4096, 64)
model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()) for _ in range(48)])
average = Average(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in range(100_000):
    at = torch.randint(len(x), (64,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[at]), y[at])
    loss.backward()
    optimizer.step()
    average.update(model)  # ill!
    average.update(model)  # well
    if step % 100 == 0:
        print(step, loss.item())
