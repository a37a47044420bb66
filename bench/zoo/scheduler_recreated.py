"""Training with a decaying learning rate.

fault: the scheduler is created again in each epoch, so that it never leaves its beginning
codes: FL053
"""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(4096, 64)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)  # well
for epoch in range(90):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)  # ill!
    for at in torch.randperm(len(x)).split(256):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[at]), x[at])
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(epoch, scheduler.get_last_lr(), loss.item())
