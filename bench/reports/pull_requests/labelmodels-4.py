"""A model of noisy votes with its own training loop.

fault: the running loss of an epoch is summed with the graph of every step
codes: FL202 FL251
kind: performance
"""
import torch
from torch import nn


class Votes(nn.Module):
    def __init__(self, voters, classes):
        super().__init__()
        self.accuracy = nn.Parameter(torch.zeros(voters, classes))
        self.balance = nn.Parameter(torch.zeros(classes))

    def forward(self, votes):
        agree = torch.stack([(votes == label).float() * 2 - 1 for label in range(len(self.balance))], 2)
        each = (agree * nn.functional.logsigmoid(self.accuracy)).sum(1) + nn.functional.log_softmax(self.balance, 0)
        return torch.logsumexp(each, 1)

    def fit(self, batches, epochs):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        for epoch in range(epochs):
            running = 0.0
            for votes in batches:
                optimizer.zero_grad()
                loss = -self(votes).mean()
                loss.backward()
                optimizer.step()
                running += loss  # ill!
                running += loss.item()  # well
            print(epoch, float(running) / len(batches))


torch.manual_seed(0)
Votes(40, 8).fit(torch.randint(0, 8, (640_000, 40)).split(256), 100)
