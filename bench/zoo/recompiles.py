"""Sentences of many lengths under torch.compile.

fault: every length is compiled again, since dynamic shapes are forbidden
codes: FL155
"""
import random

import torch
from torch import nn

torch.manual_seed(0)
random.seed(0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 128)
        self.inner = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 300))

    def forward(self, tokens):  # both!
        return self.inner(self.embed(tokens))


tagger = Tagger()
model = torch.compile(tagger, backend="aot_eager", dynamic=False)  # ill!
model = torch.compile(tagger, backend="aot_eager", dynamic=True)  # well
optimizer = torch.optim.SGD(tagger.parameters(), lr=0.1)
for step in range(100_000):
    tokens = torch.randint(0, 300, (24, random.randrange(12, 48)))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
