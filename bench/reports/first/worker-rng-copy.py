"""A program of a public report.

fault: The dataset owns a random generator with a fixed seed that is copied into every worker at each epoch, so both workers and all epochs draw the same augmentations.
link: https://github.com/wolny/pytorch-3dunet/issues/32
says: (?is)(worker|\brng\b|random|seed|augment|\bdraws?\b|noise).{0,300}(\bsame\b|identical|repeat|copy|copie|duplicat|not (re)?-?seeded|never (re)?-?seeded|frozen)
kind: correctness
"""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Volumes(Dataset):
    """A few 1-d volumes, each seen through a random shift, contrast and noise."""

    def __init__(self, volumes, labels, augment):
        self.volumes, self.labels, self.augment = volumes, labels, augment
        self.rng = np.random.RandomState(47)  # ill!
        self.rng = np.random  # well

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        v = self.volumes[i]
        if self.augment:
            v = np.roll(v, self.rng.randint(0, len(v)))  # both!
            v = v * self.rng.uniform(0.7, 1.3)  # both!
            v = v + self.rng.normal(0, 0.3, len(v))  # both!
        return torch.as_tensor(v, dtype=torch.float32), self.labels[i]  # both!


def synthetic(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    base = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    volumes = np.stack([np.sin((y + 2) * base + rng.uniform(0, 6.28)) + 0.5 * rng.normal(size=48)
                        for y in labels])
    return volumes, labels


torch.set_num_threads(1)
torch.manual_seed(0)
np.random.seed(0)
train = DataLoader(Volumes(*synthetic(16, 0), augment=True), batch_size=4, shuffle=True, num_workers=2)  # both!
x_test, y_test = synthetic(600, 1)
x_test, y_test = torch.as_tensor(x_test, dtype=torch.float32), torch.as_tensor(y_test)
net = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 3))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(24):
    net.train()
    total = 0.0
    for x, y in train:  # both!
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    net.eval()
    with torch.no_grad():
        acc = (net(x_test).argmax(1) == y_test).float().mean().item()
    if epoch % 5 == 0:
        print(f"epoch {epoch}: train loss {total / len(train):.3f}  test acc {acc:.3f}")
