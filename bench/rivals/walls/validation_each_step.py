"""A classifier with a validation set.

wall: the whole validation set is evaluated in each step
traceml: RESIDUAL_HEAVY
flatout: FL167
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def validate():
    model.eval()
    with torch.no_grad():
        hits = sum((model(a).argmax(1) == b).sum().item() for a, b in zip(x[4096:].split(256), y[4096:].split(256)))  # wall!
        hits = sum((model(a).argmax(1) == b).sum() for a, b in zip(x[4096:].split(256), y[4096:].split(256)))  # fixed
    model.train()
    return hits


def train_step(inputs, labels):
    global steps
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    steps += 1
    accuracy = validate()  # wall!
    accuracy = validate() if steps % 500 == 0 else None  # fixed


torch.manual_seed(0)
x, y = torch.randn(8192, 64), torch.randint(10, (8192,))
loader = DataLoader(TensorDataset(x[:4096], y[:4096]), batch_size=128, shuffle=True)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
steps = 0
while steps < int(sys.argv[1]):
    for inputs, labels in loader:
        train_step(inputs, labels)
