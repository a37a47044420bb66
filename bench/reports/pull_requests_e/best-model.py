"""A program of a public report.

fault: save_model gets the accuracy as a loss: the best model is that with the lowest accuracy
link: https://github.com/ebagdasa/backdoors101/pull/26
says: (?i)best|accuracy.{0,60}(loss|lower|low|worst|<|compar)|worst|compar|direction|lowest|never (saved|written|updated)|checkpoint
kind: correctness
"""
"""Trains a classifier in which some images carry a trigger, and keeps the best model of the run on disk."""
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Helper:
    def __init__(self, folder, model):
        self.folder, self.model = Path(folder), model
        self.best_loss = float("inf")  # ill!
        self.best_acc = 0.0  # well

    def save_checkpoint(self, state, filename):
        torch.save(state, self.folder / filename)

    def save_model(self, model=None, epoch=0, val_loss=0):  # ill!
    def save_model(self, model=None, epoch=0, val_acc=0):  # well
        saved_dict = {"state_dict": model.state_dict(), "epoch": epoch, "lr": 0.02}
        self.save_checkpoint(saved_dict, "model_last.pt.tar")
        if val_loss < self.best_loss:  # ill!
        if val_acc >= self.best_acc:  # well
            self.save_checkpoint(saved_dict, "model_last.pt.tar.best")  # both!
            self.best_loss = val_loss  # ill!
            self.best_acc = val_acc  # well

    def load_best(self):
        saved = torch.load(self.folder / "model_last.pt.tar.best")
        self.model.load_state_dict(saved["state_dict"])
        return saved["epoch"]


def make_images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.rand(10, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 10, (count,), generator=generator)
    return shapes[labels] + torch.randn(count, 1, 20, 20, generator=generator), labels


def poison(images, labels, share):
    images, labels = images.clone(), labels.clone()
    count = int(share * len(images))
    images[:count, :, 1:4, 1:4] = 3.0
    labels[:count] = 8
    return images, labels


def train(model, optimizer, loader):
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def test(model, loader, backdoor=False):
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            if backdoor:
                images, labels = poison(images, labels, 1.0)
            right += (model(images).argmax(1) == labels).sum().item()
    return 100 * right / len(loader.dataset)


def run(helper, loader, test_loader, epochs):
    optimizer = torch.optim.SGD(helper.model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    for epoch in range(epochs):
        loss = train(helper.model, optimizer, loader)
        acc = test(helper.model, test_loader)
        backdoor = test(helper.model, test_loader, backdoor=True)
        helper.save_model(helper.model, epoch, acc)  # both!
        print(f"epoch {epoch} loss {loss:.4f} accuracy {acc:.2f} backdoor {backdoor:.2f}", flush=True)
    print("best epoch", helper.load_best(), "accuracy", test(helper.model, test_loader))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(600, 10),
    )
    loader = DataLoader(TensorDataset(*poison(*make_images(1000, 1), 0.1)), batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(*make_images(300, 2)), batch_size=100)
    with tempfile.TemporaryDirectory() as folder:
        run(Helper(folder, model), loader, test_loader, 5000)
