"""Short epochs over a small table.

fault: a new loader with two workers is made in each epoch
codes: FL106
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    x = torch.randn(1024, 64)
    table = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(table, batch_size=128, shuffle=True)  # well
    for epoch in range(1000):
        loader = DataLoader(table, batch_size=128, shuffle=True, num_workers=2)  # ill!
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
        if epoch % 10 == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
