"""A convolutional network on the digits of scikit-learn, trained by skorch."""

import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 64, 10),
        )

    def forward(self, x):
        return self.net(x)


def main():
    torch.manual_seed(0)
    digits = load_digits()
    net = NeuralNetClassifier(
        Net,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=1e-3,
        max_epochs=2000,
        batch_size=64,
        iterator_train__shuffle=True,
        callbacks__print_log__keys_ignored=["dur"],
    )
    net.fit((digits.images[:, None] / 16).astype("float32"), digits.target)


if __name__ == "__main__":
    main()
