"""A program of a public report.

fault: The LambdaLR function returns the learning rate itself instead of a factor, so the base rate is multiplied in twice (0.02 becomes 0.0004).
link: https://github.com/lhoyer/MIC/issues/60
says: (?is)(LambdaLR|lr_lambda|lambda|schedul|learning rate|\blr\b).{0,300}(factor|multipl|squared|twice|absolute|0\.0004|4(\.0+)?e-0?4|far (below|smaller|lower)|times (smaller|lower|below))
kind: correctness
"""
import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--lr-gamma", type=float, default=0.001)
parser.add_argument("--lr-decay", type=float, default=0.75)
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args([])

torch.set_num_threads(1)
torch.manual_seed(0)
centres = 1.2 * torch.randn(6, 20)
y_all = torch.randint(0, 6, (2400,))
x_all = centres[y_all] + torch.randn(2400, 20)
train = DataLoader(TensorDataset(x_all[:2000], y_all[:2000]), batch_size=40, shuffle=True)
x_test, y_test = x_all[2000:], y_all[2000:]

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                      nn.Linear(64, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9,  # both!
                            weight_decay=1e-3, nesterov=True)
lr_scheduler = LambdaLR(  # both!
    optimizer, lambda it: args.lr * (1.0 + args.lr_gamma * it) ** (-args.lr_decay))  # ill!
    optimizer, lambda it: (1.0 + args.lr_gamma * it) ** (-args.lr_decay))  # well

for epoch in range(args.epochs):
    model.train()
    total = 0.0
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()  # both!
        total += loss.item()
    model.eval()
    with torch.no_grad():
        acc = (model(x_test).argmax(1) == y_test).float().mean().item()
    print(f"epoch {epoch}: loss {total / len(train):.3f}  test acc {acc:.3f}")
