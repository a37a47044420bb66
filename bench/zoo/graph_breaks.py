"""A gated network under torch.compile.

fault: the forward asks a tensor for its value, which cuts the graph
codes: FL156
"""
import torch
from torch import nn

torch.manual_seed(0)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 512), nn.Linear(512, 512)
        self.head = nn.Linear(512, 64)

    def forward(self, x):
        h = torch.relu(self.first(x))
        if h.mean().item() > 0.1:  # ill!
            h = h * 0.5  # ill
        h = torch.where(h.mean() > 0.1, h * 0.5, h)  # well
        return self.head(torch.relu(self.second(h)))


net = Gated()
model = torch.compile(net, backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = torch.randn(4096, 64)
for step in range(100_000):
    batch = data[torch.randint(len(data), (128,))]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
