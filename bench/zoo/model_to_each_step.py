"""A regression for whatever device there is.

fault: the whole model is moved, which it is already, in each step
codes: FL107
"""
import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.randn(8192, 40, device=device)
model = nn.Sequential(nn.Linear(40, 512), *[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(2)], nn.Linear(512, 40))
model.to(device)  # well
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    batch = x[torch.randint(len(x), (96,), device=device)]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model.to(device)(batch), batch)  # ill!
    loss = nn.functional.mse_loss(model(batch), batch)  # well
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
