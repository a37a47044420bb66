"""A bag-of-tokens classifier.

fault: the collate function pads token by token in Python
codes: FL161 FL150
"""
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

random.seed(0)
TEXTS = [([random.randrange(1, 2000) for _ in range(random.randrange(100, 128))], random.randrange(4)) for _ in range(2048)]
TENSORS = [(torch.tensor(tokens), label) for tokens, label in TEXTS]


def collate(samples):
    longest = max(len(tokens) for tokens, _ in samples)  # ill
    rows = []  # ill
    for tokens, _ in samples:  # ill
        row = []  # ill
        for at in range(longest):  # ill!
            row.append(int(tokens[at]) if at < len(tokens) else 0)  # ill!
        rows.append(row)  # ill
    return torch.tensor(rows), torch.tensor([label for _, label in samples])  # ill!
    return pad_sequence([tokens for tokens, _ in samples], batch_first=True), torch.tensor([label for _, label in samples])  # well


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(2000, 64, mode="mean", padding_idx=0)
        self.head = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 4))

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def main():
    loader = DataLoader(TENSORS, batch_size=64, shuffle=True, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1000):
        for tokens, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
