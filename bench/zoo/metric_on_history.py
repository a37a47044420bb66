"""A classifier with a running accuracy.

fault: the accuracy is computed again over all answers so far, so that each step takes longer
codes: FL170 FL251
"""
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(8192, 32), torch.randint(0, 16, (8192,))
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
answers, labels = [], []  # ill
right = torch.zeros((), dtype=torch.long)  # well
for step in range(20_000):
    at = torch.randint(len(x), (512,))
    optimizer.zero_grad()
    logits = model(x[at])
    loss = nn.functional.cross_entropy(logits, y[at])
    loss.backward()
    optimizer.step()
    answers.append(logits.detach().softmax(1))  # ill!
    labels.append(y[at])  # ill!
    accuracy = (torch.cat(answers).argmax(1) == torch.cat(labels)).float().mean()  # ill!
    right += (logits.detach().argmax(1) == y[at]).sum()  # well
    if step % 500 == 499:
        print(step, accuracy.item())  # ill
        print(step, right.item() / (512 * (step + 1)))  # well
