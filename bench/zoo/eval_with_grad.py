"""Training with a look at the validation set now and then.

fault: the validation builds a graph that nobody needs
codes: FL201
"""
import torch
from torch import nn


def validate(model, x, y):
    model.eval()
    hits = 0
    with torch.no_grad():  # well
        for inputs, labels in zip(x.split(256), y.split(256), strict=True):  # well
            hits += (model(inputs).argmax(1) == labels).sum()  # well
    for inputs, labels in zip(x.split(256), y.split(256), strict=True):  # ill
        hits += (model(inputs).argmax(1) == labels).sum()  # ill!
    model.train()
    return hits.item() / len(x)


torch.manual_seed(0)
x, y = torch.randn(5120, 64), torch.randint(0, 10, (5120,))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(100_000):
    at = torch.randint(4096, (128,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[at]), y[at])
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(step, validate(model, x[4096:], y[4096:]))
