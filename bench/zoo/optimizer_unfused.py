"""A deep network of narrow layers.

fault: Adam goes through hundreds of small parameters one by one
codes: FL151
"""
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(self.norm(x)))


x, y = torch.randn(4096, 64), torch.randn(4096, 64)
model = nn.Sequential(*[Block(64) for _ in range(48)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # ill!
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # well
size = 16  # ill
size = 256  # well

for step in range(100_000):
    chosen = torch.randint(len(x), (size,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
