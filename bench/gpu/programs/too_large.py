"""A network that is doubled in batch until it does not fit: a real out-of-memory, in a few seconds."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(
    nn.Conv2d(3, 256, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(256, 256, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(256, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = 1024
while True:
    images, labels = (
        torch.randn(batch, 3, 64, 64, device=device),
        torch.randint(0, 10, (batch,), device=device),
    )
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    batch *= 2
