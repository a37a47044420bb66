"""A program of a public report.

fault: layers in plain lists are not registered: not trained, not in train()/eval()
link: https://github.com/kanezaki/pytorch-unsupervised-segmentation/pull/6
says: (?i)ModuleList|regist|plain list|python list|\blist\b|not in.{0,30}parameters|(never|not) (trained|updated|in the optimizer|optimi[sz]ed)|optimizer.{0,60}(miss|lack|not)
kind: correctness
"""
"""Segments images without labels: a network is trained on its own most likely label of each pixel."""
import torch
from torch import nn
from torch.nn import functional as F


class MyNet(nn.Module):
    def __init__(self, input_dim, channels=32, n_conv=3):
        super().__init__()
        self.conv1 = nn.Conv2d(input_dim, channels, kernel_size=3, stride=1, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = []  # ill!
        self.bn2 = []  # ill!
        self.conv2 = nn.ModuleList([])  # well
        self.bn2 = nn.ModuleList([])  # well
        for _ in range(n_conv - 1):  # both!
            self.conv2.append(nn.Conv2d(channels, channels, kernel_size=3, stride=1, padding=1))  # both!
            self.bn2.append(nn.BatchNorm2d(channels))  # both!
        self.conv3 = nn.Conv2d(channels, channels, kernel_size=1, stride=1, padding=0)
        self.bn3 = nn.BatchNorm2d(channels)

    def forward(self, x):
        x = self.bn1(F.relu(self.conv1(x)))
        for conv, bn in zip(self.conv2, self.bn2):  # both!
            x = bn(F.relu(conv(x)))
        return self.bn3(self.conv3(x))


def make_scenes(count, size=48):
    regions = F.interpolate(torch.rand(count, 4, 4, 4), size=size, mode="bicubic").argmax(1)
    colours = torch.rand(count, 4, 3)
    images = torch.stack([colours[i][regions[i]].permute(2, 0, 1) for i in range(count)])
    return images + 0.05 * torch.randn_like(images), regions


def superpixels(size, cell=6):
    rows = torch.arange(size) // cell
    return (rows[:, None] * (size // cell) + rows).flatten()


def refine(target, cells, labels):
    votes = torch.zeros(int(cells.max()) + 1, labels).index_put_((cells, target), torch.ones(len(target)), accumulate=True)
    return votes.argmax(1)[cells]


def purity(target, regions):
    table = torch.zeros(64, 4).index_put_((target, regions.flatten()), torch.ones(len(target)), accumulate=True)
    return (table.max(1).values.sum() / len(target)).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    images, regions = make_scenes(12)
    cells, channels = superpixels(images.shape[-1]), 32
    model = MyNet(3, channels)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # both!
    for epoch in range(10_000):
        model.train()
        total = 0.0
        for image in images[torch.randperm(len(images))]:
            optimizer.zero_grad()
            output = model(image[None])[0].permute(1, 2, 0).reshape(-1, channels)
            target = refine(output.argmax(1), cells, channels)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
            total += loss.item()
        if epoch % 3 == 0:
            model.eval()
            with torch.no_grad():
                targets = [model(image[None])[0].flatten(1).argmax(0) for image in images]
            scores = [purity(target, region) for target, region in zip(targets, regions)]
            print(f"epoch {epoch} loss {total / len(images):.4f} labels {len(torch.unique(torch.cat(targets)))} purity {sum(scores) / len(scores):.3f}", flush=True)
