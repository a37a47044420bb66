"""Recommendation from a history: a tower runs on each entry, an attention on all.

fault: the tower runs on one entry of the history after another
codes: FL118 FL153 FL165
kind: performance
"""
import torch
from torch import nn


class Ranker(nn.Module):
    def __init__(self, entries=20, width=32):
        super().__init__()
        self.entries, self.width = entries, width
        self.items, self.dense = nn.EmbeddingBag(5000, width, mode="sum"), nn.Linear(16, width)
        self.tower = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def embed(self, numbers, items):
        return self.tower(torch.cat([self.dense(numbers), self.items(items)], 1))

    def forward(self, numbers, items):
        history = torch.zeros(len(numbers), self.entries, self.width)  # ill
        for entry in range(self.entries):  # ill!
            vector = self.embed(numbers[:, entry], items[:, entry])  # ill!
            history[:, entry] = nn.functional.normalize(vector, dim=1)  # ill!
        vectors = self.embed(numbers[:, :-1].flatten(0, 1), items[:, :-1].flatten(0, 1))  # well
        history = nn.functional.normalize(vectors, dim=1).view(len(numbers), self.entries, -1)  # well
        last = self.embed(numbers[:, -1], items[:, -1])
        context = (torch.softmax((history @ last.unsqueeze(2)).squeeze(2), 1).unsqueeze(2) * history).sum(1)
        return self.head(torch.cat([context, last], 1)).squeeze(1)


torch.manual_seed(0)
model = Ranker()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for step in range(100_000):
    numbers, items = torch.randn(64, 21, 16), torch.randint(0, 5000, (64, 21, 3))
    loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, items), (numbers[:, -1, 0] > 0).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
