"""A character model with a histogram of its predictions.

fault: the predictions become a Python list in each step
codes: FL101 FL167
"""
from collections import Counter

import torch
from torch import nn

torch.manual_seed(0)
text = torch.randint(0, 64, (100_000,))
model = nn.Sequential(nn.Embedding(64, 48), nn.Flatten(), nn.Linear(48 * 16, 128), nn.ReLU(), nn.Linear(128, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = Counter()  # ill
seen = torch.zeros(64)  # well
for step in range(100_000):
    at = torch.randint(len(text) - 17, (512, 1)) + torch.arange(17)
    batch = text[at]
    optimizer.zero_grad()
    logits = model(batch[:, :16])
    loss = nn.functional.cross_entropy(logits, batch[:, 16])
    loss.backward()
    optimizer.step()
    seen.update(logits.topk(48, dim=1).indices.flatten().tolist())  # ill!
    seen += torch.bincount(logits.argmax(1), minlength=64)  # well
    if step % 200 == 0:
        print(step, loss.item())
