"""Tests recorded steps: dropout, statistics, a shorter last batch, accumulation, clipping, schedules.

``--read``: the forward pass reads a value. ``--penalty N``: every N steps a gradient is differentiated.
``--second``: another model takes part.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head, self.unused = nn.Linear(32, 5), nn.Linear(32, 3)
        self.read = read

    def forward(self, images):
        hidden = self.body(images)
        if self.read and hidden.sum().item() > 1e9:
            hidden = hidden * 2
        return self.head(hidden), {"other": self.unused(hidden), "hidden": hidden}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--every-step", action="store_true", help="change the learning rate in every step")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--penalty", type=int, default=0)
    parser.add_argument("--second", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Net(args.read).to(args.device)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5)).to(args.device) if args.second else None
    parameters = [*model.parameters(), *(teacher.parameters() if teacher else ())]
    more = {"momentum": 0.9, "weight_decay": 0.01} if args.optimizer == "SGD" else {"fused": True}
    optimizer = getattr(torch.optim, args.optimizer)(
        parameters, lr=0.05 if args.optimizer == "SGD" else 0.01, **more
    )
    schedule = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        if args.every_step
        else torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    )
    data = TensorDataset(torch.randn(180, 3, 8, 8), torch.randint(5, (180,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        kept = []
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(args.device), labels.to(args.device)
            if args.penalty and step % args.penalty == 2:
                images.requires_grad_()
            output, _ = model(images)
            kept.append(output)
            loss = criterion(output, labels) / args.accumulate
            if teacher:
                loss = (
                    loss + criterion(teacher(images), labels) + criterion(teacher(images.flip(-1)), labels)
                )  # one model twice before the backward pass
            if args.penalty and step % args.penalty == 2:
                (slope,) = torch.autograd.grad(loss, images, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()
            if (step + 1) % args.accumulate == 0:
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if args.every_step:
                    schedule.step()
        if not args.every_step:
            schedule.step()
        model.eval()
        with torch.no_grad():
            outputs = [model(images.to(args.device))[0] for images, _ in loader]
        model.train()
        seen = (
            sum(output.sum() for output in outputs).item(),
            sum(output.detach().sum() for output in kept).item(),
        )
        print(
            f"epoch {epoch}: {loss.item().hex()} {seen[0].hex()} {seen[1].hex()} {model.body[1].running_mean.sum().item().hex()}",
            flush=True,
        )
    print(f"step 0: {sum(p.sum() for p in parameters).item().hex()}", flush=True)


if __name__ == "__main__":
    main()
