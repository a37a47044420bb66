"""Distillation with the teacher's answers kept for later.

fault: the key of the cache never comes again, so that it only grows
codes: FL251
"""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(2048, 80)
teacher = nn.Sequential(nn.Linear(80, 256), nn.Tanh(), nn.Linear(256, 256)).requires_grad_(False)
student = nn.Sequential(nn.Linear(80, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
order = torch.randperm(len(x)).split(128)
answers = {}
for step in range(20_000):
    at = order[step % len(order)]
    key = step  # ill
    key = step % len(order)  # well
    if key not in answers:
        answers[key] = teacher(x[at])  # both!
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(student(x[at]), answers[key])
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
