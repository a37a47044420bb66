"""ResNet-18 on images of CIFAR-10's size, written the way the tutorials write it."""

import argparse

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


class MadeUpCIFAR10(datasets.CIFAR10):
    """Synthetic images with CIFAR-10's shape and interface: a faint pattern a class, in noise."""

    def __init__(self, count, transform):
        self.transform, self.target_transform = transform, None
        rng = np.random.default_rng(0)
        self.targets = rng.integers(0, 10, count).tolist()
        patterns = rng.integers(-40, 41, (10, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2).astype(np.int16)
        noise = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        self.data = np.empty_like(noise)
        for at in range(0, count, 1000):
            self.data[at : at + 1000] = np.clip(
                noise[at : at + 1000] + patterns[self.targets[at : at + 1000]], 0, 255
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--images", type=int, default=50_000)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ]
    )
    train_set = MadeUpCIFAR10(args.images, transform)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)

    model = models.resnet18(num_classes=10).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    for epoch in range(args.epochs):
        model.train()
        running_loss, correct, total = 0.0, 0, 0
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()

            running_loss += loss.item()
            correct += (outputs.argmax(1) == labels).sum().item()
            total += labels.size(0)
        print(
            f"epoch {epoch + 1}: loss {running_loss / len(train_loader):.3f}, accuracy {100 * correct / total:.1f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
