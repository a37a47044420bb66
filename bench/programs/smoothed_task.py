"""A task module that computes its own label-smoothed loss from log_softmax, over an attention network.

The task is to reverse a sequence of numbers with occasional errors. The final metric is the share of correct
numbers.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

NUMBERS, LENGTH, SMOOTHING = 24, 12, 0.1


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        share = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, dim=-1)
        x = x + self.project((share @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Task(nn.Module):
    """``forward`` returns the loss alone."""

    def __init__(self, width=64):
        super().__init__()
        self.token, self.place = nn.Embedding(NUMBERS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUMBERS)

    def logits(self, tokens):
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place)))

    def forward(self, tokens, targets):
        log_share = F.log_softmax(self.logits(tokens), dim=-1)
        right = log_share.gather(-1, targets[..., None]).squeeze(-1)
        return -((1 - SMOOTHING) * right + SMOOTHING * log_share.mean(-1)).mean()


def batch(size, draw=None):
    tokens = torch.randint(NUMBERS, (size, LENGTH), generator=draw)
    wrong = torch.rand(size, LENGTH, generator=draw) < 0.02
    return tokens, torch.where(wrong, torch.randint(NUMBERS, (size, LENGTH), generator=draw), tokens.flip(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    task = Task()
    optimizer = torch.optim.Adam(task.parameters(), lr=args.lr, betas=(0.9, 0.98))
    for step in range(args.steps):
        loss = task(*batch(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    tokens, targets = batch(1000, torch.Generator().manual_seed(5))
    with torch.no_grad():
        print(f"final {(task.logits(tokens).argmax(-1) == targets).float().mean().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
