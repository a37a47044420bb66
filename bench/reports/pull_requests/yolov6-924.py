"""A detector of images that lie in files.

fault: each image is read, decoded and resized again in every epoch
codes: FL161 FL150
kind: performance
"""
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, files):
        self.files = files
        self.kept = [self.load(index) for index in range(len(files))]  # well

    def __len__(self):
        return len(self.files)

    def load(self, index):
        image = np.asarray(Image.open(self.files[index]).resize((64, 64)))  # ill!
        image = np.asarray(Image.open(self.files[index]).resize((64, 64)))  # well
        return np.ascontiguousarray(image.transpose(2, 0, 1))

    def __getitem__(self, index):
        image = self.load(index)  # ill!
        image = self.kept[index]  # well
        return torch.from_numpy(image).float() / 255, torch.tensor([0.5, 0.5, 0.2, 0.2])


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as home:
        random, files = np.random.default_rng(0), [Path(home) / f"{number}.jpg" for number in range(96)]
        for file in files:
            Image.fromarray(random.integers(0, 255, (480, 640, 3), dtype=np.uint8)).save(file)
        loader = DataLoader(Images(files), batch_size=16, shuffle=True)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 225, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in range(1000):
            for images, boxes in loader:  # ill!
            for images, boxes in loader:  # well
                optimizer.zero_grad()
                loss = nn.functional.l1_loss(model(images), boxes)
                loss.backward()
                optimizer.step()
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
