"""An LSTM language model on the language reference that ships with Python, without an optimizer object.

The text runs in parallel columns, and the hidden state passes from one piece to the next. Gradients are
clipped, and the script updates the weights itself.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2)
        self.decode = nn.Linear(width, vocabulary)

    def forward(self, tokens, state):
        output, state = self.lstm(self.dropout(self.embed(tokens)), state)
        return self.decode(self.dropout(output)).flatten(0, 1), state


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = " ".join(topics[name] for name in sorted(topics)).split()
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    index = {
        word: at + 1 for at, word in enumerate(sorted(counts, key=counts.get, reverse=True)[:1000])
    }  # 0: any rarer word
    data = torch.tensor([index.get(word, 0) for word in words])
    data = (
        data[: len(data) // args.batch_size * args.batch_size]
        .view(args.batch_size, -1)
        .t()
        .contiguous()
        .to(device)
    )

    model = Model(len(index) + 1, args.width).to(device)
    criterion = nn.CrossEntropyLoss()
    state = None
    for step in range(args.steps):
        at = step * args.length % (len(data) - args.length - 1)
        inputs, targets = data[at : at + args.length], data[at + 1 : at + 1 + args.length].flatten()
        model.zero_grad()
        output, state = model(inputs, state)
        state = tuple(part.detach() for part in state)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-args.lr)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
