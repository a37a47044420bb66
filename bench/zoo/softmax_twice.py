"""A classifier.

fault: probabilities are given to a loss that takes logits
codes: FL017
"""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.softmax = nn.Softmax(dim=1)  # ill

    def forward(self, x):
        return self.softmax(self.inner(x))  # ill!
        return self.inner(x)  # well


torch.manual_seed(0)
x, y = torch.randn(4096, 64), torch.randint(0, 10, (4096,))
model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    at = torch.randint(len(x), (128,))
    optimizer.zero_grad()
    loss = criterion(model(x[at]), y[at])  # both!
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
