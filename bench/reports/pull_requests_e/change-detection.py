"""A program of a public report.

fault: scikit-learn computes metrics over all pixels on the CPU in each step
link: https://github.com/ViTAE-Transformer/RSP/pull/20
says: (?i)sklearn|scikit|precision_recall|prfs|metric|numpy
kind: performance
"""
"""Change detection between two aerial images with a siamese encoder."""
import time

import numpy as np
import torch
from sklearn.metrics import precision_recall_fscore_support as prfs  # ill
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SiameseNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(width, 2, 3, padding=1)
        )

    def forward(self, before, after):
        a, b = self.encoder(before), self.encoder(after)
        return self.decoder(torch.cat(((a - b).abs(), a + b), 1))


def make_pairs(count, seed, size=64):
    generator = torch.Generator().manual_seed(seed)
    before = nn.functional.interpolate(torch.rand(count, 3, 8, 8, generator=generator), size=size, mode="bilinear")
    change = nn.functional.interpolate((torch.rand(count, 1, 4, 4, generator=generator) < 0.2).float(), size=size)
    other = torch.rand(count, 3, 1, 1, generator=generator)
    after = before * (1 - change) + other * change + 0.1 * torch.randn(count, 3, size, size, generator=generator)
    return TensorDataset(before, after, change[:, 0].long())


def initialize_metrics():
    return {name: [] for name in ("losses", "corrects", "precisions", "recalls", "f1scores")}


def set_metrics(metrics, loss, corrects, report):
    metrics["losses"].append(loss.item())
    metrics["corrects"].append(corrects.item())
    metrics["precisions"].append(report[0])
    metrics["recalls"].append(report[1])
    metrics["f1scores"].append(report[2])


def prf(labels, preds):  # well
    hits = (labels & preds).sum().item()  # well
    found, wanted = preds.sum().item(), labels.sum().item()  # well
    return hits / max(found, 1), hits / max(wanted, 1), 2 * hits / max(found + wanted, 1)  # well
  # well
  # well
def run_epoch(model, loader, criterion, optimizer=None):
    metrics = initialize_metrics()
    model.train(optimizer is not None)
    for before, after, labels in loader:
        with torch.set_grad_enabled(optimizer is not None):
            preds = model(before, after)
            loss = criterion(preds, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        preds = preds.argmax(1)
        corrects = 100 * (preds == labels).sum() / labels.numel()
        report = prfs(labels.numpy().flatten(), preds.numpy().flatten(), average="binary", pos_label=1, zero_division=0)  # ill!
        report = prf(labels, preds)  # well
        set_metrics(metrics, loss, corrects, report)
    return {name: np.mean(values) for name, values in metrics.items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    train = DataLoader(make_pairs(160, 1), batch_size=8, shuffle=True)
    val = DataLoader(make_pairs(32, 2), batch_size=8)
    model = SiameseNet()
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.5)
    for epoch in range(5000):
        begin = time.time()
        trained = run_epoch(model, train, criterion, optimizer)
        scheduler.step()
        checked = run_epoch(model, val, criterion)
        print(f"epoch {epoch} loss {trained['losses']:.4f} f1 {trained['f1scores']:.3f} val f1 {checked['f1scores']:.3f} {time.time() - begin:.2f}s", flush=True)
