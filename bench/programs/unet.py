"""A small denoising U-Net; its data set generates the noise: convolutions and large activations."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, count=2000, size=32):
        waves = torch.linspace(0, 6.3, size)
        phases = torch.rand(count, 2, 1) * 6.3
        self.clean = (
            torch.sin(waves + phases[:, 0])[:, None, None, :]
            * torch.cos(waves + phases[:, 1])[:, None, :, None]
        ).float()

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, index):
        return self.clean[index] + 0.3 * torch.randn_like(self.clean[index]), self.clean[index]


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down1, self.down2, self.middle = (
            block(1, width),
            block(width, 2 * width),
            block(2 * width, 2 * width),
        )
        self.up, self.out = (
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            nn.Sequential(block(2 * width, width), nn.Conv2d(width, 1, 1)),
        )

    def forward(self, x):
        first = self.down1(x)
        second = self.middle(self.down2(nn.functional.max_pool2d(first, 2)))
        return self.out(torch.cat([self.up(second), first], 1))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Noisy(), batch_size=32, shuffle=True)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(100_000):
        total = 0.0
        for noisy, clean in loader:
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.4f}", flush=True)


if __name__ == "__main__":
    main()
