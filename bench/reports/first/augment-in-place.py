"""A program of a public report.

fault: The dataset normalises the stored image array in place (no copy), so every epoch reads an already normalised, further distorted image.
link: https://github.com/facebookresearch/pycls/pull/21
says: (?is)(in[- ]?place|mutat|modif|overwr|written (back|into)|writes? (back )?(to|into)|corrupt|no copy|without (a )?copy).{0,200}(dataset|stored|source|sample|image|item|array|data)|(dataset|stored|source|sample|image|item|array).{0,200}(in[- ]?place|mutat|modif|overwr|written (back|into)|corrupt)|same (index|sample|item|image|row).{0,150}(differ|chang|grow|not the same)
kind: correctness
"""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MEAN, STD = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]


class Cifar(Dataset):
    """Small images held in memory; colours are normalised and images flipped on the fly."""

    def __init__(self, images, labels, train):
        self.images, self.labels, self.train = images, labels, train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        im = self.images[i]  # ill!
        im = self.images[i].copy()  # well
        for c in range(3):  # both!
            im[c] -= MEAN[c]  # both!
            im[c] /= STD[c]  # both!
        if self.train and np.random.rand() < 0.5:
            im = im[:, :, ::-1].copy()
        return torch.from_numpy(im), self.labels[i]  # both!


def synthetic(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, n)
    images = rng.normal(0.45, 0.2, (n, 3, 16, 16)).astype(np.float32)
    for k, y in enumerate(labels):
        r = 1 if y < 2 else 9
        images[k, y % 2, r:r + 6, 5:11] += 0.08
    return images, labels


torch.set_num_threads(1)
torch.manual_seed(0)
np.random.seed(0)
train = DataLoader(Cifar(*synthetic(1200, 0), train=True), batch_size=64, shuffle=True)
test = DataLoader(Cifar(*synthetic(400, 1), train=False), batch_size=100)
net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
                    nn.Flatten(), nn.Linear(16 * 16, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
for epoch in range(8):
    net.train()
    total = 0.0
    for x, y in train:
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    net.eval()
    with torch.no_grad():
        hits = sum((net(x).argmax(1) == y).sum().item() for x, y in test)
    print(f"epoch {epoch} train loss {total / len(train):.3f} test acc {hits / 400:.3f}")
