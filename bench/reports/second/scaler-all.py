"""A program of a public report.

fault: The StandardScaler is fitted on the whole series before the train/test split, so test statistics leak into training and evaluation.
link: https://github.com/daxin007/ARMD/issues/5
says: (?is)(scal(er|ing)|normali[sz]|standardi[sz]|statistic|\bmean\b|\bstd\b|fit).{0,250}(test|whole|full|entire|all (of )?the|before.{0,20}split|held[- ]?out|evaluation|leak)|(leak|test (set|data|rows|part|split)).{0,250}(scal|normali[sz]|standardi[sz]|statistic|\bmean\b|\bfit)
kind: correctness
"""
"""Long horizon forecasting of a multivariate series."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class StandardScaler:
    def fit(self, data):
        self.mean_, self.scale_ = data.mean(0), data.std(0)  # both!
        return self

    def transform(self, data):
        return (data - self.mean_) / self.scale_

    def inverse_transform(self, data):
        return data * self.scale_ + self.mean_


def read_data(length=2400, var_num=7, seed=2023):
    rng = np.random.default_rng(seed)
    t = np.arange(length)[:, None]
    daily = np.sin(2 * np.pi * (t / 24 + rng.uniform(0, 1, var_num)))
    weekly = np.sin(2 * np.pi * (t / 168 + rng.uniform(0, 1, var_num)))
    drift = np.cumsum(rng.normal(0.004, 0.03, (length, var_num)), axis=0)
    return (3 + daily + 0.5 * weekly + drift + rng.normal(0, 0.15, (length, var_num))) * rng.uniform(1, 20, var_num)


class CustomDataset(Dataset):
    def __init__(self, name, window=96, proportion=0.8, period='train'):
        super(CustomDataset, self).__init__()
        assert period in ['train', 'test'], 'period must be train or test.'
        self.name, self.period, self.window = name, period, window
        self.rawdata, self.scaler = self.read_data(name, proportion)  # both!
        self.len, self.var_num = self.rawdata.shape
        self.data = self.__normalize(self.rawdata)  # both!
        train, inference = self.__getsamples(self.data, proportion)  # both!
        self.samples = train if period == 'train' else inference
        self.sample_num = self.samples.shape[0]

    @staticmethod
    def read_data(name, proportion):
        data = read_data()
        scaler = StandardScaler()  # both!
        scaler = scaler.fit(data)  # ill!
        scaler = scaler.fit(data[:int(len(data) * proportion)])  # well
        return data, scaler

    def __normalize(self, rawdata):
        return self.scaler.transform(rawdata)  # both!

    def __getsamples(self, data, proportion):
        border = int(len(data) * proportion)
        cut = lambda part: np.stack([part[i:i + self.window] for i in range(0, len(part) - self.window + 1, 2)])
        return cut(data[:border]), cut(data[border:])

    def __getitem__(self, ind):
        return torch.from_numpy(self.samples[ind]).float()

    def __len__(self):
        return self.sample_num


class Forecaster(nn.Module):
    def __init__(self, seq_len=72, pred_len=24):
        super().__init__()
        self.seq_len, self.pred_len = seq_len, pred_len
        self.net = nn.Sequential(nn.Linear(seq_len, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, pred_len))

    def forward(self, x):
        return self.net(x.transpose(1, 2)).transpose(1, 2)


def evaluate(model, loader, scaler):
    model.eval()
    se, ae, raw, n = 0., 0., 0., 0
    with torch.no_grad():
        for batch in loader:
            pred, true = model(batch[:, :model.seq_len]), batch[:, model.seq_len:]
            se += ((pred - true) ** 2).sum().item()
            ae += (pred - true).abs().sum().item()
            raw += np.abs(scaler.inverse_transform(pred.numpy()) - scaler.inverse_transform(true.numpy())).sum()
            n += true.numel()
    return se / n, ae / n, raw / n


if __name__ == '__main__':
    torch.manual_seed(12345)
    train_set = CustomDataset('synthetic', period='train')
    test_set = CustomDataset('synthetic', period='test')
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=64, shuffle=False)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    results = tempfile.mkdtemp()
    for epoch in range(12):
        model.train()
        total = 0.
        for batch in train_loader:
            loss = nn.functional.mse_loss(model(batch[:, :72]), batch[:, 72:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        mse, mae, raw = evaluate(model, test_loader, test_set.scaler)
        print(f'epoch {epoch}: train mse {total / len(train_loader):.4f} '
              f'test mse {mse:.4f} mae {mae:.4f} mae (original units) {raw:.3f}')
        torch.save(model.state_dict(), os.path.join(results, 'checkpoint.pt'))
