"""A classifier with a confusion matrix.

fault: the matrix is filled answer by answer, in Python
codes: FL101 FL167
"""
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(8192, 64), torch.randint(0, 12, (8192,))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
matrix = torch.zeros(12, 12)
for step in range(100_000):
    at = torch.randint(len(x), (128,))
    optimizer.zero_grad()
    logits = model(x[at])
    loss = nn.functional.cross_entropy(logits, y[at])
    loss.backward()
    optimizer.step()
    found = logits.detach().argmax(1)
    for truth, answer in zip(y[at], found, strict=True):  # ill!
        matrix[truth, answer] += 1  # ill!
    matrix += torch.bincount(12 * y[at] + found, minlength=144).view(12, 12)  # well
    if step % 200 == 0:
        print(step, matrix.diag().sum().item() / matrix.sum().item())
