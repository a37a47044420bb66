"""A small convolutional network with augmented images.

fault: noise, flip and crop are done to each image in numpy, pixel rows one by one
codes: FL161 FL150
"""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def augment(image, random):  # ill
    out = np.empty_like(image)  # ill
    for channel in range(image.shape[0]):  # ill
        for row in range(image.shape[1]):  # ill!
            out[channel, row] = np.roll(image[channel, row], random.integers(-2, 3))  # ill!
    return out  # ill


class Augmented(Dataset):
    def __init__(self):
        self.random = np.random.default_rng(0)
        self.images = self.random.normal(size=(512, 3, 32, 32)).astype("float32")
        self.labels = self.random.integers(0, 10, 512)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return augment(self.images[index], self.random), self.labels[index]  # ill!
        return self.images[index], self.labels[index]  # well


def main():
    torch.manual_seed(0)
    loader = DataLoader(Augmented(), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_of = nn.CrossEntropyLoss()
    for _ in range(1000):
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
