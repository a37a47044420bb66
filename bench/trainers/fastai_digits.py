"""A convolutional network on the digits of scikit-learn, trained by the Learner of fastai."""

import torch
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import fit_one_cycle  # noqa: F401  adds the method to Learner
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.torch_core import set_seed
from sklearn.datasets import load_digits
from torch import nn


def main():
    set_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    pairs = list(zip(x, torch.tensor(digits.target), strict=True))
    data = DataLoaders.from_dsets(pairs[:1500], pairs[1500:], bs=64, num_workers=0, device="cpu")
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )
    learner = Learner(data, model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
    learner.remove_cb(ProgressCallback)
    learner.fit_one_cycle(2000, 1e-3)


if __name__ == "__main__":
    main()
