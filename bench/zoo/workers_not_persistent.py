"""Very short epochs with workers.

fault: the workers are started again for each epoch of sixteen batches
codes: FL108
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    signal = torch.randn(1024, 1, 256)
    data = TensorDataset(signal, signal.mean((1, 2)).gt(0).float())
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=1)  # ill!
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=1, persistent_workers=True)  # well
    model = nn.Sequential(nn.Conv1d(1, 32, 9, padding=4), nn.ReLU(), nn.Conv1d(32, 32, 9, padding=4), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(1000):
        for waves, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(waves).squeeze(1), labels)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
