"""A program of a public report.

fault: Subset.dataset is the whole array: training and validation data are the same
link: https://github.com/JackieHanLab/TOSICA/pull/11
says: (?i)\.dataset|same (data|samples|cells|rows)|overlap|leak|whole (data|dataset|array)|shared|identical|also in|both|validation.{0,80}train
kind: correctness
"""
"""Annotates cells with their type from the expression of genes, through masked pathway tokens."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PathwayNet(nn.Module):
    def __init__(self, genes, pathways, width, classes, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.embed = nn.Parameter(torch.randn(width, genes, pathways) / 20)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, expression):
        tokens = torch.einsum("bg,wgp->bpw", expression, self.embed * self.mask)
        tokens = torch.cat((self.token.expand(len(expression), -1, -1), tokens), 1)
        return self.head(self.block(tokens)[:, 0])


def make_cells(count, genes, types):
    rng = np.random.default_rng(0)
    profiles = rng.gamma(1.0, 1.0, (types, genes))
    labels = rng.choice(types, count, p=np.linspace(1, 3, types) / np.linspace(1, 3, types).sum())
    expression = np.log1p(rng.poisson(profiles[labels] * rng.gamma(2.0, 0.15, (count, 1))))
    wrong = rng.random(count) < 0.15
    labels[wrong] = rng.integers(0, types, wrong.sum())
    return np.concatenate((expression, labels[:, None]), 1).astype(np.float32)


def balance_populations(data):
    rng = np.random.default_rng(1)
    labels = data[:, -1].astype(int)
    size = int(np.median(np.bincount(labels)))
    picks = [rng.choice(np.flatnonzero(labels == label), size, replace=size > (labels == label).sum()) for label in np.unique(labels)]
    return data[np.concatenate(picks)]


def split_data(data, tr_ratio=0.7):
    data = balance_populations(data)
    genes = data.shape[1] - 1
    train_size = int(len(data) * tr_ratio)
    train_dataset, valid_dataset = torch.utils.data.random_split(data, [train_size, len(data) - train_size])  # both!
    exp_train = torch.from_numpy(train_dataset.dataset[:, :genes].astype(np.float32))  # ill!
    label_train = torch.from_numpy(train_dataset.dataset[:, -1].astype(np.int64))  # ill!
    exp_valid = torch.from_numpy(valid_dataset.dataset[:, :genes].astype(np.float32))  # ill!
    label_valid = torch.from_numpy(valid_dataset.dataset[:, -1].astype(np.int64))  # ill!
    exp_train = torch.from_numpy(np.array(train_dataset)[:, :genes].astype(np.float32))  # well
    label_train = torch.from_numpy(np.array(train_dataset)[:, -1].astype(np.int64))  # well
    exp_valid = torch.from_numpy(np.array(valid_dataset)[:, :genes].astype(np.float32))  # well
    label_valid = torch.from_numpy(np.array(valid_dataset)[:, -1].astype(np.int64))  # well
    return exp_train, label_train, exp_valid, label_valid


def run_epoch(model, loader, optimizer=None):
    model.train(optimizer is not None)
    total, right = 0.0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for expression, labels in loader:
            output = model(expression)
            loss = nn.functional.cross_entropy(output, labels)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * len(labels)
            right += (output.argmax(1) == labels).sum().item()
    return total / len(loader.dataset), right / len(loader.dataset)


if __name__ == "__main__":
    torch.manual_seed(1)
    exp_train, label_train, exp_valid, label_valid = split_data(make_cells(1200, 200, 6))
    train_loader = DataLoader(TensorDataset(exp_train, label_train), batch_size=16, shuffle=True)
    valid_loader = DataLoader(TensorDataset(exp_valid, label_valid), batch_size=64)
    mask = (torch.rand(200, 30) < 0.2).float()
    model = PathwayNet(200, 30, 32, 6, mask)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=5e-5)
    for epoch in range(5000):
        train_loss, train_accuracy = run_epoch(model, train_loader, optimizer)
        valid_loss, valid_accuracy = run_epoch(model, valid_loader)
        print(f"epoch {epoch} train {train_loss:.4f} {train_accuracy:.3f} valid {valid_loss:.4f} {valid_accuracy:.3f}", flush=True)
