"""A classifier that counts its hits.

fault: the predictions are copied to the host in each step
codes: FL101
"""
import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.randn(8192, 128, device=device)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
hits = torch.zeros((), dtype=torch.long)  # ill
hits = torch.zeros((), dtype=torch.long, device=device)  # well

for step in range(100_000):
    chosen = torch.randint(len(x), (192,), device=device)
    optimizer.zero_grad()
    logits = model(x[chosen])
    loss = nn.functional.cross_entropy(logits, y[chosen])
    loss.backward()
    optimizer.step()
    hits += (logits.argmax(1).cpu() == y[chosen].cpu()).sum()  # ill!
    hits += (logits.argmax(1) == y[chosen]).sum()  # well
    if step % 100 == 99:
        print(f"{step + 1}: {hits / (192 * (step + 1)):.3f}")
