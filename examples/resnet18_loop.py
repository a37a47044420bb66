"""`resnet18.py` with the Loop: the same results; the script still evaluates between two steps."""

import argparse

import torch
from resnet18 import accuracy, make_loaders
from torch.nn import functional as F
from torchvision.models import resnet18

import flatout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, help="only so many, for a first look")
    args = parser.parse_args()

    flatout.seed(args.seed)
    device = flatout.device()
    train, test = make_loaders(args.batch_size, args.workers, args.images)
    model = resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    total = 0.0
    for step in flatout.Loop(model, optimizer, loss_fn, train, epochs=args.epochs, scheduler=schedule):
        total += step.loss.item()
        if step.ends_epoch:
            print(
                f"epoch {step.epoch + 1}/{args.epochs}: loss {total / len(train):.4f}, accuracy {accuracy(model, test, device):.2%}",
                flush=True,
            )
            model.train()
            total = 0.0


if __name__ == "__main__":
    main()
