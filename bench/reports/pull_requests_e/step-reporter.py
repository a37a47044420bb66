"""A program of a public report.

fault: the reporter stores clones that keep their graph; the sum of an epoch keeps the graphs of all steps
link: https://github.com/pfnet/pytorch-pfn-extras/pull/49
says: (?i)graph|detach|memory.{0,40}(grow|rise|leak|accumul|increas)|grow|leak|retain|keeps?
kind: performance
"""
"""An image autoencoder whose trainer reports named values and prints their means at the end of an epoch."""
import contextlib
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Summary:
    def __init__(self):
        self.x, self.n = 0.0, 0

    def add(self, value):
        self.x = self.x + value  # both!
        self.n += 1

    def mean(self):
        return (self.x / self.n).item()


class Reporter:
    _stack = []

    def __init__(self):
        self.observation = {}

    @contextlib.contextmanager
    def scope(self, observation):
        old, self.observation = self.observation, observation
        Reporter._stack.append(self)
        yield
        Reporter._stack.pop()
        self.observation = old

    def report(self, values):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):  # both!
                value = value.clone()  # ill!
                value = value.detach()  # well
            self.observation[name] = value  # both!


def report(values):
    if Reporter._stack:
        Reporter._stack[-1].report(values)


class AutoEncoder(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1), nn.GELU(), nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GELU())
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(channels, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, images):
        code = self.encoder(images)
        again = self.decoder(code)
        reconstruction = nn.functional.mse_loss(again, images)
        sparsity = code.abs().mean()
        report({"reconstruction": reconstruction, "sparsity": sparsity, "l1": (again - images).abs().mean()})  # both!
        return reconstruction + 1e-3 * sparsity


class Trainer:
    def __init__(self, model, loader, valid):
        self.model, self.loader, self.valid = model, loader, valid
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.reporter = Reporter()

    def run(self, epochs):
        for epoch in range(epochs):
            begin, summaries = time.time(), {}
            self.model.train()
            for (images,) in self.loader:
                observation = {}
                with self.reporter.scope(observation):
                    self.optimizer.zero_grad()
                    loss = self.model(images)
                    loss.backward()
                    self.optimizer.step()
                    report({"loss": loss})  # both!
                for name, value in observation.items():
                    summaries.setdefault(name, Summary()).add(value)  # both!
            self.model.eval()
            with torch.no_grad():
                valid = sum(self.model(images).item() for (images,) in self.valid) / len(self.valid)
            means = " ".join(f"{name} {summary.mean():.4f}" for name, summary in summaries.items())
            print(f"epoch {epoch} {means} valid {valid:.4f} {time.time() - begin:.2f}s", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    basis = torch.rand(8, 3 * 32 * 32)
    images = lambda count: (torch.rand(count, 8).softmax(1) @ basis).view(count, 3, 32, 32)
    loader = DataLoader(TensorDataset(images(4096)), batch_size=16, shuffle=True)
    Trainer(AutoEncoder(), loader, DataLoader(TensorDataset(images(512)), batch_size=64)).run(5000)
