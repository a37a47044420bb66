"""A program of a public report.

fault: the validation's forward passes record an autograd graph
link: https://github.com/jpata/particleflow/pull/290
says: (?i)no_grad|inference_mode|set_grad_enabled|(autograd )?graph|gradients?.{0,60}(valid|eval|never|not used|unused)
kind: performance
"""
"""Particle flow: classifies the elements of collision events and regresses their momentum."""
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MLPF(nn.Module):
    def __init__(self, features=12, width=64, layers=3, classes=5):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, width), nn.ELU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(layers))
        self.kind = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, classes))
        self.momentum = nn.Sequential(nn.Linear(width + classes, width), nn.ELU(), nn.Linear(width, 4))

    def forward(self, elements):
        hidden = self.embed(elements)
        for layer in self.layers:
            hidden = layer(hidden)
        kind = self.kind(hidden)
        return kind, self.momentum(torch.cat((hidden, kind), -1))


def make_events(count, elements, seed):
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    features = torch.randn(count, elements, 12, generator=generator)
    kind = (features @ torch.randn(12, 5, generator=fixed)).argmax(-1)
    momentum = torch.tanh(features @ torch.randn(12, 4, generator=fixed)) * (kind > 0)[..., None]
    return TensorDataset(features, kind, momentum)


def mlpf_loss(kind, target_kind, momentum, target_momentum):
    classification = nn.functional.cross_entropy(kind.flatten(0, 1), target_kind.flatten())
    regression = nn.functional.huber_loss(momentum, target_momentum)
    return {"Total": classification + 5 * regression, "Classification": classification, "Regression": regression}


def train_and_valid(model, optimizer, loader, is_train):
    model.train(is_train)  # both!
    epoch_loss, right, seen = {}, 0, 0
    for elements, target_kind, target_momentum in loader:  # both!
        kind, momentum = model(elements)  # ill!
        with torch.set_grad_enabled(is_train):  # well
            kind, momentum = model(elements)  # well
        loss = mlpf_loss(kind, target_kind, momentum, target_momentum)  # both!
        if is_train:
            optimizer.zero_grad()
            loss["Total"].backward()
            optimizer.step()
        for name, value in loss.items():
            epoch_loss[name] = epoch_loss.get(name, 0.0) + value.detach() / len(loader)
        right += (kind.argmax(-1) == target_kind).sum().item()
        seen += target_kind.numel()
    return {name: float(value) for name, value in epoch_loss.items()}, right / seen


def train_mlpf(model, optimizer, train_loader, valid_loader, epochs):
    for epoch in range(epochs):
        begin = time.time()
        train_loss, _ = train_and_valid(model, optimizer, train_loader, True)
        valid_loss, accuracy = train_and_valid(model, optimizer, valid_loader, False)  # both!
        print(f"epoch {epoch} train {train_loss['Total']:.4f} valid {valid_loss['Total']:.4f} accuracy {accuracy:.3f} {time.time() - begin:.2f}s", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    train_loader = DataLoader(make_events(120, 160, 1), batch_size=8, shuffle=True)
    valid_loader = DataLoader(make_events(96, 160, 2), batch_size=24)
    model = MLPF()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_mlpf(model, optimizer, train_loader, valid_loader, 5000)
