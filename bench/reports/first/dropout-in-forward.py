"""A program of a public report.

fault: nn.Dropout is constructed inside forward, so it is always in training mode and stays active in evaluation.
link: https://github.com/yangze0930/NTS-Net/issues/14
says: (?is)dropout.{0,300}(eval|inference|validat|\btest|inside forward|in forward|each (call|forward)|every (call|forward)|construct|created|always|not registered|never switched|stays? (on|active))|(eval|inference|validat).{0,200}(random|differ|not determin|stochastic).{0,200}
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import torch.nn.functional as F


class FineGrainedNet(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        feature = F.adaptive_avg_pool2d(x, 1).flatten(1)
        feature = nn.Dropout(p=0.5)(feature)  # ill!
        feature = F.dropout(feature, p=0.5, training=self.training)  # well
        return self.fc(feature)  # both!


def stripes(n):
    """Eight classes: the orientation of a grating."""
    y = torch.randint(0, 8, (n,))
    angle = y * torch.pi / 8
    grid = torch.arange(16.0)
    phase = 6.3 * torch.rand(n, 1, 1)
    wave = (angle.cos()[:, None, None] * grid[None, :, None]
            + angle.sin()[:, None, None] * grid[None, None, :])
    return (torch.sin(1.3 * wave + phase) + 0.2 * torch.randn(n, 16, 16)).unsqueeze(1), y


torch.set_num_threads(1)
torch.manual_seed(0)
train = DataLoader(TensorDataset(*stripes(1600)), batch_size=32, shuffle=True)
x_test, y_test = stripes(600)
net = FineGrainedNet()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(8):
    net.train()
    total = 0.0
    for x, y in train:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    net.eval()  # both!
    with torch.no_grad():
        acc = (net(x_test).argmax(1) == y_test).float().mean().item()  # both!
    print(f"epoch {epoch}: loss {total / len(train):.3f}  test acc {acc:.3f}")
