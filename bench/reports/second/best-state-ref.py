"""A program of a public report.

fault: best_model_dict = model.state_dict() keeps references to the live tensors (no copy), so the "best" weights are those of the last epoch.
link: https://github.com/WenjieDu/PyPOTS/issues/667
says: (?is)(state_?dict|best|snapshot|saved|kept).{0,300}(reference|alias|no copy|not (a |been )?cop(y|ied)|without (a )?copy|deepcopy|deep copy|clone|same (memory|tensor|storage|object)|live|share|shares|view|last epoch|latest|current|overwrit|chang(ed|es|ing) (with|after|by|along)|follow)
kind: correctness
"""
"""Imputation of missing values in multivariate time series."""
import os
import tempfile
from copy import deepcopy  # well

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def make_series(n, steps, feats, rng):
    t = np.arange(steps)[None, :, None]
    phase = rng.uniform(0, 2 * np.pi, (n, 1, feats))
    period = rng.uniform(8, 20, (n, 1, 1))
    x = np.sin(2 * np.pi * t / period + phase) + 0.5 * rng.normal(size=(n, steps, feats))
    holdout = rng.uniform(size=x.shape) < 0.2
    X = x.copy()
    X[holdout] = 0
    to = lambda a: torch.tensor(a, dtype=torch.float32)
    return TensorDataset(to(X), to(~holdout), to(x), to(holdout))


def masked_mae(pred, target, mask):
    return ((pred - target).abs() * mask).sum() / (mask.sum() + 1e-12)


class Imputer(nn.Module):
    def __init__(self, steps, feats, d):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(2 * steps * feats, d), nn.ReLU(),
                                 nn.Linear(d, d), nn.ReLU(), nn.Linear(d, steps * feats))
        self.steps, self.feats = steps, feats

    def forward(self, X, missing_mask):
        out = self.net(torch.cat([X, missing_mask], dim=-1))
        return out.view(-1, self.steps, self.feats)


class BaseNNModel:
    def __init__(self, model, epochs, patience, lr, saving_path):
        self.model = model
        self.epochs = epochs
        self.patience = patience
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.saving_path = saving_path
        self.best_loss = float("inf")
        self.best_epoch = -1
        self.best_model_dict = None

    def evaluate(self, loader):
        self.model.eval()
        losses, weights = [], []
        with torch.no_grad():
            for X, mask, X_ori, indicating in loader:
                losses.append(masked_mae(self.model(X, mask), X_ori, indicating).item())
                weights.append(indicating.sum().item())
        return float(np.average(losses, weights=weights))

    def _train_model(self, train_loader, val_loader):
        patience = self.patience
        for epoch in range(1, self.epochs + 1):
            self.model.train()
            epoch_losses = []
            for X, mask, X_ori, indicating in train_loader:
                self.optimizer.zero_grad()
                rec = self.model(X, mask)
                loss = masked_mae(rec, X_ori, mask) + masked_mae(rec, X_ori, indicating)
                loss.backward()
                self.optimizer.step()
                epoch_losses.append(loss.item())
            val_loss = self.evaluate(val_loader)
            print(f"Epoch {epoch:03d} - training loss: {np.mean(epoch_losses):.4f}, validation loss: {val_loss:.4f}")
            if val_loss < self.best_loss:
                self.best_epoch = epoch
                self.best_loss = val_loss
                self.best_model_dict = self.model.state_dict()  # ill!
                self.best_model_dict = deepcopy(self.model.state_dict())  # well
                patience = self.patience
            else:
                patience -= 1
            if patience == 0:
                print("Exceeded the training patience. Terminating the training procedure...")
                break
        print(f"Finished training. The best model is from epoch#{self.best_epoch}.")

    def fit(self, train_loader, val_loader):
        self._train_model(train_loader, val_loader)
        self.model.load_state_dict(self.best_model_dict)  # both!
        self.model.eval()
        torch.save(self.model.state_dict(), os.path.join(self.saving_path, "imputer.pypots"))


if __name__ == "__main__":
    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    train = DataLoader(make_series(240, 24, 6, rng), batch_size=32, shuffle=True)
    val = DataLoader(make_series(120, 24, 6, rng), batch_size=32)
    test = DataLoader(make_series(120, 24, 6, rng), batch_size=32)
    imputer = BaseNNModel(Imputer(24, 6, 256), epochs=80, patience=40, lr=2e-3, saving_path=tempfile.mkdtemp())
    imputer.fit(train, val)
    print(f"best validation MAE {imputer.best_loss:.4f}, loaded model on validation {imputer.evaluate(val):.4f}, "
          f"test MAE {imputer.evaluate(test):.4f}")
