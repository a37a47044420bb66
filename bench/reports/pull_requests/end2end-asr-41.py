"""A speech model whose validation follows each epoch.

fault: the validation builds graphs that are never used
codes: FL201
kind: performance
"""
import torch
from torch import nn


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.GRU(40, 128, 2, batch_first=True), nn.Linear(128, 30)

    def forward(self, features):
        return self.head(self.inner(features)[0])


def run(model, optimizer, train, valid):
    for epoch in range(1000):
        model.train()
        for features, texts in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features).flatten(0, 1), texts.flatten())
            loss.backward()
            optimizer.step()
        model.eval()  # ill!
        model.eval()  # well
        total = 0.0
        for features, texts in valid:  # ill!
        for features, texts in valid:  # well
            found = model(features)  # ill!
            with torch.no_grad():  # well
                found = model(features)  # well
            total += nn.functional.cross_entropy(found.flatten(0, 1), texts.flatten()).item()
        print(epoch, total / len(valid))


torch.manual_seed(0)
model = Recogniser()
data = [(torch.randn(16, 60, 40), torch.randint(0, 30, (16, 60))) for _ in range(14)]
run(model, torch.optim.Adam(model.parameters(), lr=1e-3), data[:8], data[8:])
