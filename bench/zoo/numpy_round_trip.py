"""Regression on standardised features.

fault: each batch goes through numpy on its way into the model
codes: FL101 FL167
"""
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(8192, 256)
y = x[:, :8].sum(1)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mean, deviation = x.mean(0), x.std(0)

for epoch in range(1000):
    order = torch.randperm(len(x))
    for inputs, targets in zip(x[order].split(128), y[order].split(128), strict=True):
        ranked = np.argsort(np.argsort(inputs.numpy(), axis=0), axis=0) / len(inputs)  # ill!
        inputs = torch.from_numpy(np.sort(ranked, axis=1).astype("float32"))  # ill!
        inputs = (inputs - mean) / deviation  # well
        optimizer.zero_grad()
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        loss.backward()
        optimizer.step()
    print(epoch, float(loss))
