"""A classifier of images that lie compressed in memory.

fault: each image is decompressed and decoded each time it is fetched
codes: FL161 FL150
"""
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count):
        random = np.random.default_rng(0)
        self.labels = torch.from_numpy(random.integers(0, 10, count))
        raw = (random.normal(size=(count, 3, 64, 64)).cumsum(axis=3) * 8).astype("int16")
        self.packed = [zlib.compress(image.tobytes(), 6) for image in raw]  # ill
        self.images = torch.from_numpy(raw[:, :, ::2, ::2].astype("float32") / 255)  # well

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = np.frombuffer(zlib.decompress(self.packed[index]), dtype="int16")  # ill!
        image = image.reshape(3, 64, 64).astype("float64")[:, ::2, ::2] / 255  # ill!
        return torch.from_numpy(image.astype("float32")), self.labels[index]  # ill!
        return self.images[index], self.labels[index]  # well


def main():
    torch.manual_seed(0)
    loader = DataLoader(Images(640), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Conv2d(3, 28, 3), nn.ReLU(), nn.Conv2d(28, 56, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(56 * 14 * 14, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1000):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
