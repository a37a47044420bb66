"""A loop that keeps each loss with its graph."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
).to(device)
optimizer = torch.optim.AdamW(model.parameters())
losses = []
while True:
    images, labels = torch.randn(64, 256, device=device), torch.randint(0, 10, (64,), device=device)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss)
