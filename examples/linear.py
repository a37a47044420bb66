"""Linear regression on scikit-learn's diabetes data, with all tensors on the device.

Batches are selected by index on the device; plain SGD; no DataLoader. A step is so small that overhead
dominates.
"""

import argparse

import torch
from sklearn.datasets import load_diabetes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    diabetes = load_diabetes()
    x = torch.tensor(diabetes.data, dtype=torch.float32, device=device)
    y = torch.tensor(diabetes.target, dtype=torch.float32, device=device)[:, None]
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()

    model = torch.nn.Linear(x.shape[1], 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)
    for step in range(args.steps):
        rows = torch.randint(len(x), (args.batch_size,), device=device)
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
