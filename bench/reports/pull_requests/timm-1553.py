"""A deep classifier with a moving average of its weights.

fault: the average is updated tensor by tensor, with new tensors each time
codes: FL153 FL165 FL167
kind: performance
"""
from copy import deepcopy

import torch
from torch import nn


class Average:
    def __init__(self, model, decay=0.999):
        self.module, self.decay = deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for kept, new in zip(self.module.state_dict().values(), model.state_dict().values()):  # ill!
            kept.copy_(self.decay * kept + (1.0 - self.decay) * new)  # ill!
        kept, new = tuple(self.module.parameters()), tuple(model.parameters())  # well
        torch._foreach_lerp_(kept, new, 1.0 - self.decay)  # well


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(self.norm(x)))


torch.manual_seed(0)
x, y = torch.randn(4096, 64), torch.randint(0, 64, (4096,))
model = nn.Sequential(*[Block() for _ in range(48)])
average = Average(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in range(100_000):
    at = torch.randint(len(x), (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[at]), y[at])
    loss.backward()
    optimizer.step()
    average.update(model)  # ill!
    average.update(model)  # well
    if step % 100 == 0:
        print(step, loss.item())
