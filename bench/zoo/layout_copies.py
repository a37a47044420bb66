"""Images whose layout changes again and again.

fault: the forward converts between layouts and copies each time
codes: FL171
"""
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.ModuleList(nn.Conv2d(32, 32, 1) for _ in range(4))
        self.head = nn.Linear(32, 6)

    def forward(self, x):
        for mix in self.mix:
            x = x.permute(0, 2, 3, 1).contiguous()  # ill!
            x = x.permute(0, 2, 1, 3).contiguous()  # ill!
            x = x.permute(0, 3, 1, 2).contiguous()  # ill!
            x = torch.relu(mix(x))
        return self.head(x.mean((2, 3)))


images, labels = torch.randn(256, 32, 32, 32), torch.randint(0, 6, (256,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100_000):
    at = torch.randint(len(images), (24,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[at]), labels[at])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
