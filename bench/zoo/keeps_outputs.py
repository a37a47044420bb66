"""A classifier that looks at its outputs afterwards.

fault: the outputs of every step are kept for good
codes: FL251
"""
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(8192, 96), torch.randint(0, 512, (8192,))
model = nn.Sequential(nn.Linear(96, 512), nn.ReLU(), nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []  # ill
right = torch.zeros((), dtype=torch.long)  # well

for step in range(20_000):
    at = torch.randint(len(x), (256,))
    optimizer.zero_grad()
    logits = model(x[at])
    loss = nn.functional.cross_entropy(logits, y[at])
    loss.backward()
    optimizer.step()
    history.append(logits.detach())  # ill!
    right += (logits.argmax(1) == y[at]).sum()  # well
    if step % 500 == 499:
        print(step + 1, torch.cat(history).std().item())  # ill
        print(step + 1, right.item())  # well
