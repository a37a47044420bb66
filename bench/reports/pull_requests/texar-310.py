"""A text classifier with functions for an epoch and an evaluation.

fault: the evaluation inside the epoch leaves the model in evaluation mode
codes: FL016
kind: performance
"""
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 64), nn.Linear(64, 4)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)).mean(1))


def main():
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, labels = torch.randint(0, 1000, (4096, 32)), torch.randint(0, 4, (4096,))

    def train_epoch():
        model.train()  # ill!
        model.train()  # well
        for step, at in enumerate(torch.randperm(3840).split(32)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens[at]), labels[at])  # ill!
            loss = nn.functional.cross_entropy(model(tokens[at]), labels[at])  # well
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                evaluate()  # ill!
                evaluate()  # well
                model.train()  # well

    @torch.no_grad()
    def evaluate():
        model.eval()  # ill!
        model.eval()  # well
        print((model(tokens[3840:]).argmax(1) == labels[3840:]).float().mean().item())

    for _ in range(1000):
        train_epoch()


main()
