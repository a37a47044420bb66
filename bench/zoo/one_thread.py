"""A wide network on a machine with several cores.

fault: the program keeps torch to one thread
codes: FL158
"""
import torch
from torch import nn

torch.set_num_threads(1)  # ill!
torch.manual_seed(0)
x = torch.randn(4096, 512)
y = x[:, :16].softmax(1)
model = nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    at = torch.randint(len(x), (384,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[at]), y[at])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
