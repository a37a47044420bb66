"""`cnn.py` with the Loop: the same results, and batches of any size in micro-batches that fit."""

import argparse

import torch
from cnn import SIZE, Net, Patches
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms

import flatout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, help="only so many, for a first look")
    args = parser.parse_args()

    flatout.seed(args.seed)
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
    model = Net().to(flatout.device())
    criterion = nn.CrossEntropyLoss()

    def loss_fn(model, batch):
        x, y = batch
        output = model(x)
        return criterion(output, y), {"right": (output.argmax(1) == y).sum()}

    loop = flatout.Loop(
        model,
        torch.optim.Adam(model.parameters(), lr=args.lr),
        loss_fn,
        loader,
        epochs=args.epochs,
        metrics={"right": "sum"},
    )
    total, right = 0.0, 0
    for step in loop:
        total += step.loss.item() * step.samples
        right += step.metrics["right"].item()
        if step.ends_epoch:
            count = len(loader.dataset)
            print(
                f"epoch {step.epoch + 1}/{args.epochs}: loss {total / count:.4f}, training accuracy {right / count:.2%}",
                flush=True,
            )
            total, right = 0.0, 0


if __name__ == "__main__":
    main()
