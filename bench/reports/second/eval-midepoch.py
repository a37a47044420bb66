"""A program of a public report.

fault: validate() puts the model in eval mode in the middle of an epoch and nothing puts it back in train mode, so the rest of the epoch trains without dropout and with frozen batch-norm statistics.
link: https://github.com/wkentaro/pytorch-fcn/issues/57
says: (?is)((eval(uation)?|train(ing)?)( mode|\(\)|-mode)|\.training|(left|stay\w*|remain\w*|still) in eval).{0,300}(mid(dle)?|after|left|remain|stay|still|never|not|back|switch|restor|forgot|while (training|updat)|backward|optimi[sz]er|dropout|batch[- _]?norm|train\(\)|updates?)|(dropout|batch[- _]?norm).{0,250}(off|inactive|disabled|eval|frozen|not (active|updat))
kind: correctness
"""
import math
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class ShapesSeg(Dataset):
    n_class = 3

    def __init__(self, n, seed):
        rng = np.random.RandomState(seed)
        yy, xx = np.mgrid[:32, :32]
        self.imgs, self.lbls = [], []
        for _ in range(n):
            lbl = np.zeros((32, 32), dtype=np.int64)
            cy, cx, r = rng.randint(6, 26), rng.randint(6, 26), rng.randint(4, 8)
            lbl[(yy - cy) ** 2 + (xx - cx) ** 2 < r * r] = 1
            y0, x0, s = rng.randint(0, 24), rng.randint(0, 24), rng.randint(4, 8)
            lbl[y0:y0 + s, x0:x0 + s] = 2
            base = np.array([[.2, .3, .3], [.6, .3, .4], [.3, .6, .5]])[lbl].transpose(2, 0, 1)
            self.imgs.append((base * rng.uniform(.6, 1.4) + rng.randn(3, 32, 32) * .2).astype(np.float32))
            self.lbls.append(lbl)

    def __len__(self):
        return len(self.imgs)

    def __getitem__(self, i):
        return torch.from_numpy(self.imgs[i]), torch.from_numpy(self.lbls[i])


class FCN(nn.Module):
    def __init__(self, n_class):
        super(FCN, self).__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2))
        self.fc6 = nn.Sequential(nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.5))
        self.score_fr = nn.Conv2d(96, n_class, 1)
        self.score_pool1 = nn.Conv2d(24, n_class, 1)

    def forward(self, x):
        p1 = self.conv1(x)
        h = self.score_fr(self.fc6(self.conv2(p1)))
        h = F.interpolate(h, scale_factor=2, mode='bilinear', align_corners=False) + self.score_pool1(p1)
        return F.interpolate(h, size=x.shape[2:], mode='bilinear', align_corners=False)


class Trainer(object):
    def __init__(self, model, optimizer, train_loader, val_loader, out, max_iter, interval_validate):
        self.model, self.optim = model, optimizer
        self.train_loader, self.val_loader = train_loader, val_loader
        self.out, self.max_iter, self.interval_validate = out, max_iter, interval_validate
        self.epoch, self.iteration, self.best_acc = 0, 0, 0

    def validate(self):  # both!
        training = self.model.training  # well
        self.model.eval()  # both!
        val_loss, correct, total = 0, 0, 0
        with torch.no_grad():
            for data, target in self.val_loader:
                score = self.model(data)
                val_loss += F.cross_entropy(score, target).item() / len(self.val_loader)
                correct += (score.max(1)[1] == target).sum().item()
                total += target.numel()
        acc = correct / total
        print('epoch %d iter %d valid/loss %.4f valid/acc %.4f' % (self.epoch, self.iteration, val_loss, acc))
        is_best = acc > self.best_acc
        self.best_acc = max(acc, self.best_acc)
        path = os.path.join(self.out, 'checkpoint.pth.tar')
        torch.save({'epoch': self.epoch, 'iteration': self.iteration, 'best': self.best_acc,
                    'optim_state_dict': self.optim.state_dict(),
                    'model_state_dict': self.model.state_dict()}, path)
        if is_best:
            torch.save(self.model.state_dict(), os.path.join(self.out, 'model_best.pth.tar'))
        if training:  # well
            self.model.train()  # well

    def train_epoch(self):
        self.model.train()  # both!
        for batch_idx, (data, target) in enumerate(self.train_loader):
            self.iteration = batch_idx + self.epoch * len(self.train_loader)
            if self.iteration % self.interval_validate == 0:  # both!
                self.validate()  # both!
            self.optim.zero_grad()
            score = self.model(data)  # both!
            loss = F.cross_entropy(score, target)
            loss.backward()  # both!
            self.optim.step()
            if self.iteration >= self.max_iter:
                break

    def train(self):
        max_epoch = int(math.ceil(1. * self.max_iter / len(self.train_loader)))
        for epoch in range(max_epoch):
            self.epoch = epoch
            self.train_epoch()
        self.validate()


if __name__ == '__main__':
    torch.manual_seed(1337)
    train_loader = DataLoader(ShapesSeg(480, 0), batch_size=8, shuffle=True)
    val_loader = DataLoader(ShapesSeg(80, 1), batch_size=8, shuffle=False)
    model = FCN(ShapesSeg.n_class)
    optim = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    Trainer(model, optim, train_loader, val_loader, tempfile.mkdtemp(), max_iter=240, interval_validate=25).train()
