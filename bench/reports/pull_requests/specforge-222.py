"""A draft model whose accuracy is computed in a compiled function.

fault: the compiled function returns Python numbers, which breaks its graph
codes: FL156 FL101
kind: performance
"""
import torch
from torch import nn


@torch.compile(backend="aot_eager")
def accuracy(logits, target, mask):
    return ((logits.argmax(-1) == target) * mask).sum().item() / (mask.sum().item() + 1e-6)  # ill!
    return ((logits.argmax(-1) == target) * mask).sum() / mask.sum().clamp_min(1e-6)  # well


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(512, 96), nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(100_000):
    tokens = torch.randint(0, 512, (4, 65))
    mask = (torch.rand(4, 64) < 0.8).float()
    accuracies = []
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    for ahead in range(4):
        accuracies.append(accuracy(logits.detach(), tokens[:, 1:].roll(ahead, 1), mask))
    loss = (nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * mask).mean()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item(), float(accuracies[0]))
