"""A small language model with AdamW.

fault: AdamW updates one parameter at a time
codes: FL151
kind: performance
"""
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, words=512, width=96, layers=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, foreach=False)  # ill!
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)  # well
text = torch.randint(0, 512, (100_000,))
for step in range(100_000):
    at = torch.randint(len(text) - 65, (2,))
    tokens = torch.stack([text[start : start + 65] for start in at.tolist()])
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()  # ill!
    optimizer.step()  # well
    optimizer.zero_grad()
    if step % 100 == 0:
        print(step, loss.item())
