"""Small networks on small samples.

fault: the model is called for each sample of the batch by itself
codes: FL153
"""
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(4096, 24), torch.randn(4096, 3)
model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))  # ill
model = nn.Sequential(nn.Linear(24, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))  # well
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(100_000):
    chosen = torch.randint(len(x), (128,))
    inputs, targets = x[chosen], y[chosen]
    optimizer.zero_grad()
    loss = 0.0  # ill
    for i in range(len(inputs)):  # ill!
        prediction = model(inputs[i])  # ill!
        loss = loss + (prediction - targets[i]).square().mean() / len(inputs)  # ill!
    loss = (model(inputs) - targets).square().mean()  # well
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
