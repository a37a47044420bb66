"""Reads values of a card in many ways: in each step and at the end, before and long after a backward pass."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    x = torch.randn(150, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    train, test = DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=64)
    criterion = nn.CrossEntropyLoss()

    step = 0
    for epoch in range(args.epochs):
        model.train()
        for at, (inputs, labels) in enumerate(train):
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = model(inputs)
            largest = outputs.abs().max().item()
            loss = criterion(outputs, labels) / args.accumulate
            correct = (outputs.argmax(1) == labels).sum()
            metrics = {
                "confidence": outputs.softmax(1).amax(1).mean().detach(),
                "scaled": loss.detach() * args.accumulate,
            }
            loss.backward()
            if (at + 1) % args.accumulate == 0:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            late = (outputs.argmax(1) == labels).float().mean()
            metadata = [
                loss.item(),
                float(loss.detach()),
                int(correct),
                metrics["confidence"].cpu().item(),
                metrics["scaled"].to("cpu").tolist(),
                float(norm) if step else 0.0,
                late.item(),
                largest,
            ]
            with torch.no_grad():
                loss += 1
            print(
                f"step {step}: {' '.join(map(repr, metadata))} {loss:.6f} {bool(correct)} {loss.item()!r}",
                flush=True,
            )
            step += 1
        model.eval()
        with torch.no_grad():
            total = sum(
                criterion(model(inputs.to(device)), labels.to(device)).item() for inputs, labels in test
            )
        print(f"epoch {epoch}: {total!r}", flush=True)


if __name__ == "__main__":
    main()
