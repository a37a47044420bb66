"""A video transformer that caches its rotary frequencies by size.

fault: the keys of the cache are tensors, which are never found again
codes: FL251 FL252
kind: performance
"""
import torch
from torch import nn


class Video(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(width, 4, 256, batch_first=True)
        self.cached = {}

    def forward(self, clips, sizes):
        found = []
        for size in sizes:  # ill
            if size not in self.cached:  # ill!
                self.cached[size] = frequencies(size.tolist(), clips.shape[-1])  # ill!
            found.append(self.cached[size])  # ill
        for size in map(tuple, sizes.tolist()):  # well
            if size not in self.cached:  # well
                self.cached[size] = frequencies(size, clips.shape[-1])  # well
            found.append(self.cached[size])  # well
        return self.inner(clips + torch.stack(found))


def frequencies(size, width):
    frames, height, across = size
    places = torch.arange(frames * height * across).unsqueeze(1)
    return torch.cat([torch.sin(places / 100), torch.cos(places / 100)], 1).repeat(1, width // 2)


torch.manual_seed(0)
clips, model = torch.randn(64, 4 * 8 * 8, 64), Video()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(100_000):
    at = torch.randint(len(clips), (8,))
    sizes = torch.tensor([[4, 8, 8]] * len(at))
    optimizer.zero_grad()
    loss = (model(clips[at], sizes) - clips[at]).square().mean()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
