"""A table that lies in memory.

fault: sixteen workers carry what the program could index by itself
codes: FL166 FL150
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    x = torch.randn(16384, 48)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=128, shuffle=True, num_workers=16, persistent_workers=True)  # ill!
    loader = DataLoader(data, batch_size=128, shuffle=True)  # well
    model = nn.Sequential(nn.Linear(48, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(1000):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"{epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
