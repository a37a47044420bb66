"""A small transformer encoder.

fault: the allocator's cache is emptied in each step
codes: FL104
"""
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tokens = torch.randint(0, 500, (2048, 24), device=device)
embed = nn.Embedding(500, 64)
encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = nn.Sequential(embed, encoder, nn.Linear(64, 500)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    batch = tokens[torch.randint(len(tokens), (24,), device=device)]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    loss.backward()
    optimizer.step()
    torch.cuda.empty_cache()  # ill!
    if step % 100 == 0:
        print(f"{step}: {loss.item():.4f}")
