"""A program of a public report.

fault: Mean IoU is computed on each batch of 4 images and averaged over batches instead of from intersections and unions accumulated over the validation set.
link: https://github.com/IvLabs/stagewise-knowledge-distillation/issues/12
says: (?is)(iou|metric|score|f1|validation).{0,250}(per[- ]batch|each batch|every batch|batches|batch size|batch_size|accumulat|averag\w* (of|over)|mean of (the )?(means|batch)|smaller last batch|last batch|confusion|depends on)|(batch(es)?).{0,200}(iou|metric|averag|mean of means)
kind: correctness
"""
"""Train a small U-Net student for road scenes, report mean IoU over the validation set."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 6


def make_scenes(n, seed, size=32):
    rng = np.random.default_rng(seed)
    colours = np.linspace(0.1, 0.9, NUM_CLASSES * 3).reshape(-1, 3)
    images, masks = [], []
    for _ in range(n):
        mask = np.zeros((size, size), dtype=np.int64)
        mask[rng.integers(12, 20):] = 1
        for cls, chance in ((2, 0.9), (3, 0.5), (4, 0.2), (5, 0.08)):
            if rng.uniform() < chance:
                y, x, h, w = rng.integers(0, 24), rng.integers(0, 24), rng.integers(3, 9), rng.integers(3, 9)
                mask[y:y + h, x:x + w] = cls
        image = colours[mask].transpose(2, 0, 1) * rng.uniform(0.7, 1.3) + rng.normal(0, 0.12, (3, size, size))
        images.append(image.astype(np.float32))
        masks.append(mask)
    return TensorDataset(torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(masks)))


class UNet(nn.Module):
    def __init__(self, num_classes, ch=16):
        super().__init__()
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
        self.enc1, self.enc2, self.mid = block(3, ch), block(ch, 2 * ch), block(2 * ch, 2 * ch)
        self.dec2, self.dec1 = block(4 * ch, ch), block(2 * ch, ch)
        self.head = nn.Conv2d(ch, num_classes, 1)

    def forward(self, x):
        e1 = self.enc1(x)
        e2 = self.enc2(F.max_pool2d(e1, 2))
        m = self.mid(F.max_pool2d(e2, 2))
        d2 = self.dec2(torch.cat([F.interpolate(m, scale_factor=2), e2], 1))
        d1 = self.dec1(torch.cat([F.interpolate(d2, scale_factor=2), e1], 1))
        return self.head(d1)


def intersection_and_union(pred, target, num_classes):
    inter, union = torch.zeros(num_classes), torch.zeros(num_classes)
    for cls in range(num_classes):
        p, t = pred == cls, target == cls
        inter[cls] = (p & t).sum()
        union[cls] = (p | t).sum()
    return inter, union


def iou(inter, union):  # both!
    seen = union > 0  # both!
    return (inter[seen] / union[seen]).mean().item()  # both!


def mean_iou(model, dataloader):  # both!
    model.eval()
    ious = list()  # ill!
    inter, union = torch.zeros(NUM_CLASSES), torch.zeros(NUM_CLASSES)  # well
    with torch.no_grad():
        for data, target in dataloader:
            prediction = F.softmax(model(data), dim=1)
            prediction = torch.argmax(prediction, axis=1)
            ious.append(iou(*intersection_and_union(prediction, target, NUM_CLASSES)))  # ill!
    return sum(ious) / len(ious)  # ill!
            batch_inter, batch_union = intersection_and_union(prediction, target, NUM_CLASSES)  # well
            inter += batch_inter  # well
            union += batch_union  # well
    return iou(inter, union)  # well


def train(model, train_loader, val_loader, optimizer, scheduler, epochs, save_dir):
    max_miou = 0.
    for epoch in range(epochs):
        model.train()
        losses = []
        for images, masks in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), masks)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        model.eval()
        val_losses, weights = [], []
        with torch.no_grad():
            for images, masks in val_loader:
                val_losses.append(F.cross_entropy(model(images), masks).item())
                weights.append(len(images))
        val_loss = np.average(val_losses, weights=weights)
        mIOU = mean_iou(model, val_loader)  # both!
        print('epoch : %d, train loss : %.4f, val loss : %.4f, mIoU : %.4f' % (
            epoch + 1, np.mean(losses), val_loss, mIOU))
        if mIOU > max_miou:
            max_miou = mIOU
            torch.save(model.state_dict(), os.path.join(save_dir, 'best.pt'))
    return max_miou


if __name__ == '__main__':
    torch.manual_seed(0)
    train_loader = DataLoader(make_scenes(320, 0), batch_size=16, shuffle=True)
    val_loader = DataLoader(make_scenes(90, 1), batch_size=4, shuffle=False)
    model = UNet(NUM_CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    best = train(model, train_loader, val_loader, optimizer, scheduler, 6, tempfile.mkdtemp())
    print('best mIoU %.4f' % best)
