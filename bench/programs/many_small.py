"""Many small layers with AdamW and a loader over tensors: a step made of hundreds of tiny operations."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        TensorDataset(torch.randn(8192, 32), torch.randn(8192, 1)), batch_size=64, shuffle=True
    )
    model = nn.Sequential(
        nn.Linear(32, 48),
        *[nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.SiLU()) for _ in range(12)],
        nn.Linear(48, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(100_000):
        total = 0.0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if epoch % 20 == 0:
            print(f"epoch {epoch}: {total / len(loader):.4f}", flush=True)


if __name__ == "__main__":
    main()
