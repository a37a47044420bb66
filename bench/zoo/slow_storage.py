"""A regression on records behind a slow store.

fault: the program itself waits for the store, record by record, without a worker
codes: FL161 FL150
"""
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    def __init__(self):
        self.x = torch.randn(4096, 96)
        self.y = self.x[:, :1].sin() + self.x[:, 1:2]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(0.0002)  # ill!
        return self.x[index], self.y[index]


def main():
    torch.manual_seed(1)
    loader = DataLoader(Records(), batch_size=96, shuffle=True)
    model = nn.Sequential(nn.Linear(96, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(1000):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
