"""Two heads over one body.

fault: the graph is retained although nothing walks through it again
codes: FL203
"""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(4096, 64)
body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
mean, sign = nn.Linear(256, 1), nn.Linear(256, 2)
optimizer = torch.optim.SGD([*body.parameters(), *mean.parameters(), *sign.parameters()], lr=0.01)
for step in range(100_000):
    batch = x[torch.randint(len(x), (192,))]
    features = body(batch)
    loss = nn.functional.mse_loss(mean(features)[:, 0], batch.mean(1)) + nn.functional.cross_entropy(sign(features), (batch[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward(retain_graph=True)  # ill!
    loss.backward()  # well
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
