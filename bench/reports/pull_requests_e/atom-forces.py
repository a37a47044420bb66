"""A program of a public report.

fault: collate grows the matrix with torch.cat in a loop: quadratic copies
link: https://github.com/ulissigroup/amptorch/pull/13
says: (?i)torch\.cat|\bcat\b|grow|quadratic|append|concat|collate|factorize_data|wait.{0,40}(data|loader|batch)|workers?
kind: performance
"""
"""Energies and forces of small molecules from fingerprints of their atoms, one network per element."""
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FEATURES = 16


class Molecules(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        mix = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
        self.items = []
        for _ in range(count):
            atoms = int(torch.randint(8, 15, (1,), generator=generator))
            prints = torch.randn(atoms, FEATURES, generator=generator)
            primes = torch.randn(atoms, FEATURES, 3 * atoms, generator=generator) / atoms
            elements = torch.randint(0, 2, (atoms,), generator=generator)
            energy = torch.tanh(prints @ mix).sum()
            slope = (1 - torch.tanh(prints @ mix) ** 2)[:, None] * mix
            forces = -torch.einsum("af,afx->x", slope, primes)
            self.items.append((prints, primes, elements, energy, forces))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def factorize_data(batch):
    """One row of the matrix of derivatives for each (atom, feature), one column for each coordinate of the batch."""  # both!
    coordinates = sum(item[4].numel() for item in batch)  # both!
    fprimes = torch.zeros(0, coordinates)  # ill!
    start = 0  # ill!
    fprimes = torch.zeros(sum(len(item[0]) for item in batch) * FEATURES, coordinates)  # well
    row = start = 0  # well
    for prints, primes, elements, energy, forces in batch:  # both!
        size = forces.numel()  # both!
        for atom in range(len(prints)):  # ill!
            block = torch.zeros(FEATURES, coordinates)  # ill!
            block[:, start:start + size] = primes[atom]  # ill!
            fprimes = torch.cat((fprimes, block), dim=0)  # ill!
        start += size  # ill
        rows = len(prints) * FEATURES  # well
        fprimes[row:row + rows, start:start + size] = primes.reshape(rows, size)  # well
        row, start = row + rows, start + size  # well
    return fprimes


def collate_amp(batch):
    owners = torch.cat([torch.full((len(item[0]),), i) for i, item in enumerate(batch)])
    prints = torch.cat([item[0] for item in batch])
    elements = torch.cat([item[2] for item in batch])
    energies = torch.stack([item[3] for item in batch])
    forces = torch.cat([item[4] for item in batch])
    return owners, prints, elements, factorize_data(batch), energies, forces


class FullNN(nn.Module):
    def __init__(self, width=160):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)) for _ in range(2)
        )

    def forward(self, owners, prints, elements, fprimes, images):
        prints = prints.requires_grad_()
        atoms = sum(net(prints)[:, 0] * (elements == i) for i, net in enumerate(self.nets))
        energies = torch.zeros(images).index_add(0, owners, atoms)
        (slope,) = torch.autograd.grad(energies.sum(), prints, create_graph=self.training)
        return energies, -(slope.reshape(-1) @ fprimes)


def batch_loss(model, batch):
    owners, prints, elements, fprimes, energies, forces = batch
    energy, force = model(owners, prints, elements, fprimes, len(energies))
    return nn.functional.mse_loss(energy, energies) + 0.1 * nn.functional.mse_loss(force, forces)


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Molecules(240, 1), batch_size=6, shuffle=True, collate_fn=collate_amp)
    valid = DataLoader(Molecules(48, 2), batch_size=6, collate_fn=collate_amp)
    model = FullNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(5000):
        begin, total = time.time(), 0.0
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss = batch_loss(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.item()
        model.eval()
        error = sum(batch_loss(model, batch).item() for batch in valid) / len(valid)
        print(f"epoch {epoch} loss {total / len(loader):.4f} valid {error:.4f} {time.time() - begin:.2f}s", flush=True)
