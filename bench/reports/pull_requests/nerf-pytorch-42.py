"""A radiance field of many small operations.

fault: anomaly detection is left on
codes: FL112
kind: performance
"""
import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)  # ill!


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(39, 96), *(nn.Linear(96, 96) for _ in range(6))])
        self.out = nn.Linear(96, 4)

    def forward(self, points):
        x = torch.cat([points, *(f(points * 2**k) for k in range(6) for f in (torch.sin, torch.cos))], -1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(x)


def render(field, start, way):
    depths = torch.linspace(2, 6, 24)
    found = field(start[:, None] + way[:, None] * depths[:, None])
    alpha = 1 - torch.exp(-torch.relu(found[..., 3]))
    light = torch.cumprod(torch.cat([torch.ones(len(alpha), 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return (torch.sigmoid(found[..., :3]) * (alpha * light)[..., None]).sum(1)


torch.manual_seed(0)
field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=5e-4)
starts, ways, colours = torch.randn(4096, 3), torch.randn(4096, 3), torch.rand(4096, 3)
for step in range(100_000):
    at = torch.randint(len(starts), (64,))
    loss = (render(field, starts[at], ways[at]) - colours[at]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
