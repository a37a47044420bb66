"""A mixture of experts that all see each sample.

fault: gradients are filled with zeros in each step instead of being dropped
codes: FL174
"""
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(4096, 32), torch.randn(4096, 8)
experts = nn.ModuleList(nn.Linear(32, 8) for _ in range(8))
gate = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8), nn.Softmax(dim=1))
optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.05)
for step in range(100_000):
    at = torch.randint(len(x), (128,))
    optimizer.zero_grad(set_to_none=False)  # ill!
    optimizer.zero_grad()  # well
    answers = torch.stack([expert(x[at]) for expert in experts], dim=1)
    loss = nn.functional.mse_loss((gate(x[at]).unsqueeze(2) * answers).sum(1), y[at])
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
