"""A data set that notes what it gave.

fault: the data set keeps a record of every sample it has ever given
codes: FL252
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noted(Dataset):
    def __init__(self):
        self.x = torch.randn(2048, 1024)
        self.y = self.x[:, :1].sign()
        self.given = []  # ill

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.given.append([index, self.x[index].tolist()])  # ill!
        return self.x[index], self.y[index]


def main():
    torch.manual_seed(0)
    loader = DataLoader(Noted(), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(1000):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
