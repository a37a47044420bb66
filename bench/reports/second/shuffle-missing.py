"""A program of a public report.

fault: The training DataLoader does not shuffle a dataset that is sorted by class folder, so each batch has a single class.
link: https://github.com/Deci-AI/super-gradients/issues/416
says: (?is)shuffl|(same|identical|fixed).{0,60}order|(sorted|ordered|grouped|consecutive).{0,120}(class|label|target)|(batch(es)?).{0,200}(one|single|same|only).{0,30}(class|label)|(one|single|same|only one).{0,30}(class|label).{0,200}batch|order.{0,150}(same|never chang|fixed|every epoch|each epoch)
kind: correctness
"""
"""Recipe for image classification: folder dataset, dataloader params, SGD with nesterov, cosine schedule."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

DEFAULT_TRAIN_DATALOADER_PARAMS = {"batch_size": 64, "num_workers": 0, "drop_last": False}  # both!
DEFAULT_VAL_DATALOADER_PARAMS = {"batch_size": 200, "num_workers": 0, "drop_last": False}


class ImageFolderDigits(Dataset):
    """One folder for each class: samples are listed in the order of the class folders."""

    def __init__(self, root, train=True, per_class=250):
        prefix = os.path.join(root, "MNIST/raw", "train" if train else "t10k")
        images = np.fromfile(prefix + "-images-idx3-ubyte", dtype=np.uint8)[16:].reshape(-1, 1, 28, 28)
        labels = np.fromfile(prefix + "-labels-idx1-ubyte", dtype=np.uint8)[8:]
        self.classes = [str(c) for c in range(10)]
        self.samples = []
        for c in range(10):
            for i in np.flatnonzero(labels == c)[:per_class]:
                self.samples.append((images[i], c))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, target = self.samples[index]
        return (torch.from_numpy(image.astype(np.float32)) / 255 - 0.13) / 0.31, target


def get_dataloader(dataset, default_params, dataloader_params=None):
    params = dict(default_params)  # both!
    params.update(dataloader_params or {})
    return DataLoader(dataset, **params)  # both!


class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(cin, cout, 3, 2, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(),
                               nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout))
        self.skip = nn.Conv2d(cin, cout, 1, 2, bias=False)

    def forward(self, x):
        return torch.relu(self.f(x) + self.skip(x))


class ResNetMini(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.net = nn.Sequential(ResBlock(1, 16), ResBlock(16, 32), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(128, num_classes)

    def forward(self, x):
        return self.fc(self.net(x))


class Trainer:
    def __init__(self, ckpt_root_dir):
        self.ckpt_dir = ckpt_root_dir

    def train(self, model, training_params, train_loader, valid_loader):
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=training_params["initial_lr"],
                                    **training_params["optimizer_params"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training_params["max_epochs"])
        best = 0.0
        for epoch in range(training_params["max_epochs"]):
            model.train()
            loss_sum, hits, n = 0.0, 0, 0
            for inputs, targets in train_loader:  # both!
                outputs = model(inputs)
                loss = criterion(outputs, targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.item() * len(targets)
                hits += (outputs.argmax(1) == targets).sum().item()
                n += len(targets)
            scheduler.step()
            model.eval()
            with torch.no_grad():
                ok = sum((model(x).argmax(1) == y).sum().item() for x, y in valid_loader)
            acc = ok / len(valid_loader.dataset)
            print(f"SUMMARY OF EPOCH {epoch}: Train loss {loss_sum / n:.4f} Train acc {hits / n:.4f} Valid acc {acc:.4f}")
            torch.save({"net": model.state_dict(), "epoch": epoch, "acc": acc},
                       os.path.join(self.ckpt_dir, "ckpt_latest.pth"))
            if acc > best:
                best = acc
                torch.save({"net": model.state_dict(), "acc": acc}, os.path.join(self.ckpt_dir, "ckpt_best.pth"))


if __name__ == "__main__":
    torch.manual_seed(0)
    root = os.environ["DATA"] + "/mnist"
    dataloader_params = {"batch_size": 50}  # ill!
    dataloader_params = {"batch_size": 50, "shuffle": True}  # well
    train_params = {
        "max_epochs": 4,
        "initial_lr": 0.05,
        "optimizer_params": {"weight_decay": 0.0001, "momentum": 0.9, "nesterov": True},
    }
    train_dataloader = get_dataloader(ImageFolderDigits(root), DEFAULT_TRAIN_DATALOADER_PARAMS, dataloader_params)  # both!
    valid_dataloader = get_dataloader(ImageFolderDigits(root, train=False, per_class=80), DEFAULT_VAL_DATALOADER_PARAMS)
    Trainer(tempfile.mkdtemp()).train(ResNetMini(10), train_params, train_dataloader, valid_dataloader)
