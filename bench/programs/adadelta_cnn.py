"""A convolutional network with dropout and log-probabilities, under Adadelta at a learning rate of 1.0.

The first steps are large: rounding of the last place is a tenth of the loss after a few of them. The metric
at the end is the test accuracy.
"""

import argparse

import torch
from gratings import CLASSES, gratings
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, width, 3), nn.Conv2d(width, 2 * width, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(2 * width * 36, 64), nn.Linear(64, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    loader = DataLoader(
        TensorDataset(*gratings(6000, 16, 2.0, seed=1)), batch_size=64, shuffle=True, drop_last=True
    )
    test = gratings(4000, 16, 2.0, seed=2)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
        schedule.step()
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss.item():.4f}", flush=True)
    print(f"final {accuracy(model, *test):.6f}", flush=True)


if __name__ == "__main__":
    main()
