"""A small CNN with batch normalisation and dropout that recognises which part of a photograph a patch shows.

The photographs ship with scikit-learn (china.jpg, flower.jpg). torchvision transforms crop, flip and
normalise the patches one by one in the DataLoader; the optimizer is Adam.
"""

import argparse

import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

SIZE, STRIDE = 24, 12


class Patches(Dataset):
    """Patches on a grid over each photograph, with six labels.

    The label is the photograph and its upper, middle or lower third.
    """

    def __init__(self, transform, images=None):
        self.photos = [Image.fromarray(photo) for photo in load_sample_images().images]
        self.places = [
            (at, left, top)
            for at, photo in enumerate(self.photos)
            for left in range(0, photo.width - SIZE, STRIDE)
            for top in range(0, photo.height - SIZE, STRIDE)
        ]
        self.places = self.places[:: len(self.places) // images][:images] if images else self.places
        self.transform = transform

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        at, left, top = self.places[index]
        photo = self.photos[at]
        return self.transform(
            photo.crop((left, top, left + SIZE, top + SIZE))
        ), 3 * at + 3 * top // photo.height


def conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(conv(3, width), conv(width, 2 * width), conv(2 * width, 4 * width))
        self.classify = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * width * (SIZE // 8) ** 2, 6)
        )

    def forward(self, x):
        return self.classify(self.features(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, help="only so many, for a first look")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transform = transforms.Compose(
        [
            transforms.RandomCrop(SIZE, padding=3),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.46, 0.46, 0.40), (0.28, 0.27, 0.31)),
        ]
    )
    loader = DataLoader(
        Patches(transform, args.images), batch_size=args.batch_size, shuffle=True, num_workers=args.workers
    )
    model = Net().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        total, right = 0.0, 0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            output = model(x)
            loss = criterion(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
            right += (output.argmax(1) == y).sum().item()
        count = len(loader.dataset)
        print(
            f"epoch {epoch + 1}/{args.epochs}: loss {total / count:.4f}, training accuracy {right / count:.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
