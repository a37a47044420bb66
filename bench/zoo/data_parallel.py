"""A classifier for all GPUs that there are.

fault: DataParallel, which copies the model in each step and steers all GPUs from one process
codes: FL115
"""
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = torch.randn(8192, 100, device=device), torch.randint(0, 10, (8192,), device=device)
model = nn.Sequential(nn.Linear(100, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
model = nn.DataParallel(model)  # ill!
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100_000):
    at = torch.randint(len(x), (128,), device=device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[at]), y[at])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
