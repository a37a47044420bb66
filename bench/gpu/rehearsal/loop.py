"""flatout's own loop on a card."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--micro-batch")
    args = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    for step in flatout.Loop(
        model,
        optimizer,
        loss_fn,
        loader,
        epochs=args.steps,
        steps=args.steps,
        micro_batch=args.micro_batch,
    ):
        if step.index % 10 == 0:
            print(f"step {step.index}: {step.loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
