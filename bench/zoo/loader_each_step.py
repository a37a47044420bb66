"""Training by iterations instead of epochs.

fault: each step makes a loader and takes its first batch only
codes: FL117 FL106
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

torch.manual_seed(0)
x = torch.randn(60000, 32)
data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
model = nn.Sequential(nn.Linear(32, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(data, batch_size=128, sampler=RandomSampler(data, replacement=True, num_samples=128 * 20000)))  # well

for step in range(20000):
    inputs, targets = next(iter(DataLoader(data, batch_size=128, shuffle=True)))  # ill!
    inputs, targets = next(batches)  # well
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
