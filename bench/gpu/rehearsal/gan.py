"""Two models and two optimizers on one card, with losses that the program reads at each step."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    critic = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(torch.randn(1000, 32)), batch_size=64, shuffle=True, pin_memory=True)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        for (real,) in loader:
            real = real.to(device, non_blocking=True)
            one, zero = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)
            fake = generator(torch.randn(len(real), 16, device=device))

            critic_optimizer.zero_grad()
            critic_loss = criterion(critic(real), one) + criterion(critic(fake.detach()), zero)
            critic_loss.backward()
            critic_optimizer.step()

            generator_optimizer.zero_grad()
            generator_loss = criterion(critic(fake), one)
            generator_loss.backward()
            generator_optimizer.step()
            losses = critic_loss.item(), generator_loss.item()
        print(f"epoch {epoch}: {losses[0]:.6f} {losses[1]:.6f}", flush=True)


if __name__ == "__main__":
    main()
