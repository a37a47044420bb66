"""`linear.py` with the Loop: the same results."""

import argparse

import torch
from sklearn.datasets import load_diabetes

import flatout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    flatout.seed(args.seed)
    device = flatout.device()
    diabetes = load_diabetes()
    x = torch.tensor(diabetes.data, dtype=torch.float32, device=device)
    y = torch.tensor(diabetes.target, dtype=torch.float32, device=device)[:, None]
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()

    def batches():
        while True:
            rows = torch.randint(len(x), (args.batch_size,), device=device)
            yield x[rows], y[rows]

    def loss_fn(model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    model = torch.nn.Linear(x.shape[1], 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)
    for step in flatout.Loop(model, optimizer, loss_fn, batches(), steps=args.steps):
        if step.index % 500 == 0:
            print(f"step {step.index}: loss {float(step.loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
