"""An autoencoder that reports a running loss.

fault: the loss is fetched from the device in each step
codes: FL101
"""
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.rand(8192, 196, device=device)
model = nn.Sequential(nn.Linear(196, 512), nn.ReLU(), nn.Linear(512, 24), nn.ReLU(), nn.Linear(24, 512), nn.ReLU(), nn.Linear(512, 196), nn.Sigmoid())
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
running = 0.0  # ill
running = torch.zeros((), device=device)  # well

for step in range(100_000):
    batch = data[torch.randint(len(data), (128,), device=device)]
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy(model(batch), batch)
    loss.backward()
    optimizer.step()
    running += loss.item()  # ill!
    running += loss.detach()  # well
    if step % 200 == 199:
        print(f"{step + 1}: {running / 200:.4f}")
        running = 0.0  # ill
        running.zero_()  # well
