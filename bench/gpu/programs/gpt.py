"""GPT-2 124M from scratch in plain float32, with attention written by hand, as users write it.

Tokens are made up (word frequencies like a language's, and some order), so nothing has to be downloaded.
"""

import argparse
import math
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Attention(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.project = nn.Linear(width, width)
        self.register_buffer(
            "mask", torch.triu(torch.ones(context, context), diagonal=1).bool(), persistent=False
        )

    def forward(self, x):
        batch, length, width = x.shape
        q = self.query(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        k = self.key(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        v = self.value(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.mask[:length, :length], float("-inf"))
        mixed = torch.softmax(scores, dim=-1) @ v
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class GELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, context) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if "project" in name else 0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Windows(Dataset):
    """Windows of a long sequence of tokens, and the same one token later."""

    def __init__(self, count, context, vocabulary):
        rng = np.random.default_rng(0)
        rank = np.minimum(rng.zipf(1.2, count), vocabulary) - 1
        follow = rng.random(count) < 0.3
        rank[1:][follow[1:]] = (rank[:-1][follow[1:]] * 7 + 1) % vocabulary
        self.tokens = torch.from_numpy(rank.astype(np.int64))
        self.context = context

    def __len__(self):
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index):
        at = index * self.context
        return self.tokens[at : at + self.context], self.tokens[at + 1 : at + self.context + 1]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    return parser


def main():
    args = arguments().parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        Windows(args.tokens, args.context, args.vocabulary),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    model = GPT(args.vocabulary, args.context, args.width, args.heads, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    autocast = torch.autocast(device.type, torch.bfloat16) if args.bf16 else nullcontext()
    step = 0
    for _ in range(args.epochs):
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            with autocast:
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            step += 1


if __name__ == "__main__":
    main()
