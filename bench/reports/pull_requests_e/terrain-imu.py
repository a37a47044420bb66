"""A program of a public report.

fault: each sample's files are read and parsed again in each epoch
link: https://github.com/norlab-ulaval/BorealTC/pull/7
says: (?i)loadtxt|(read|load|pars|decod).{0,80}(again|each|every|file)|same files?|pre-?load|cache|file|wait.{0,40}(data|loader|batch)|workers?
kind: performance
"""
"""Classifies terrain from windows of an inertial unit and of the wheels' motors, one file for each window."""
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

TERRAINS = ["asphalt", "flooring", "ice", "silty_loam", "snow"]


def write_windows(root, count, seed):
    rng = np.random.default_rng(seed)
    for number in range(count):
        label = int(rng.integers(len(TERRAINS)))
        clock = np.arange(80)[:, None] * (0.2 + 0.1 * label)
        imu = np.sin(clock + rng.uniform(0, 6, 6)) + 0.8 * rng.standard_normal((80, 6))
        pro = 0.2 * label + rng.standard_normal((20, 4))
        folder = root / TERRAINS[label]
        folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(folder / f"imu_{number:04}.csv", imu, delimiter=",", fmt="%.5f")
        np.savetxt(folder / f"pro_{number:04}.csv", pro, delimiter=",", fmt="%.5f")


class TerrainDataset(Dataset):
    def __init__(self, root, mean=0.0, std=1.0):
        self.paths = sorted(root.rglob("imu_*.csv"))
        self.mean, self.std = mean, std
        self.samples = [self.load_sample(path) for path in self.paths]  # well

    def __len__(self):
        return len(self.paths)

    def load_sample(self, path):  # both!
        imu = np.loadtxt(path, delimiter=",", dtype=np.float32)  # both!
        pro = np.loadtxt(path.with_name(path.name.replace("imu", "pro")), delimiter=",", dtype=np.float32)  # both!
        return imu, pro, TERRAINS.index(path.parent.name)

    def __getitem__(self, index):
        imu, pro, label = self.load_sample(self.paths[index])  # ill!
        imu, pro, label = self.samples[index]  # well
        return torch.from_numpy((imu - self.mean) / self.std), torch.from_numpy(pro), label


class TerrainNet(nn.Module):
    def __init__(self, width=80):
        super().__init__()
        self.imu = nn.Sequential(nn.Conv1d(6, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU())
        self.pro = nn.GRU(4, 48, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width + 48, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, len(TERRAINS)))

    def forward(self, imu, pro):
        motion = self.imu(imu.transpose(1, 2)).amax(2)
        return self.head(torch.cat((motion, self.pro(pro)[1][0]), 1))


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_windows(root / "train", 800, 1)
        write_windows(root / "val", 160, 2)
        train = DataLoader(TerrainDataset(root / "train"), batch_size=32, shuffle=True)  # both!
        val = DataLoader(TerrainDataset(root / "val"), batch_size=32)
        model = TerrainNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(5000):
            begin, total = time.time(), 0.0
            model.train()
            for imu, pro, labels in train:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(imu, pro), labels)
                loss.backward()
                optimizer.step()
                total += loss.item()
            model.eval()
            with torch.no_grad():
                right = sum((model(imu, pro).argmax(1) == labels).sum().item() for imu, pro, labels in val)
            print(f"epoch {epoch} loss {total / len(train):.3f} val {right / len(val.dataset):.3f} {time.time() - begin:.2f}s", flush=True)
