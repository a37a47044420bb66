"""ResNet-18 on scikit-learn's handwritten digits, drawn as 32x32 RGB images.

A typical recipe for small images: PIL images, per-item augmentation in a Dataset, a DataLoader, SGD with
momentum, a cosine schedule, accuracy after each epoch. The data set ships with scikit-learn; nothing is
downloaded.
"""

import argparse

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.models import resnet18

MEAN, STD = (0.24, 0.24, 0.24), (0.34, 0.34, 0.34)


class Digits(Dataset):
    """1,797 digits of 8x8 pixels with 17 grey levels, enlarged to 32x32."""

    def __init__(self, images, labels, transform):
        self.images = [
            Image.fromarray((image * 15).astype("uint8"))
            .resize((32, 32), Image.Resampling.BICUBIC)
            .convert("RGB")
            for image in images
        ]
        self.labels = labels
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.labels[index])


def make_loaders(batch_size, workers, images=None):
    augment = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.ColorJitter(brightness=0.3, contrast=0.3),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    plain = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    digits = load_digits()
    images, labels = digits.images[:images], digits.target[:images]
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0)
    train = DataLoader(
        Digits(train_x, train_y, augment),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
    )
    return train, DataLoader(Digits(test_x, test_y, plain), batch_size=batch_size)


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, help="only so many, for a first look")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, test = make_loaders(args.batch_size, args.workers, args.images)
    model = resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(
            f"epoch {epoch + 1}/{args.epochs}: loss {total / len(train):.4f}, accuracy {accuracy(model, test, device):.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
