"""A training whose batch grows until the device is full: it learns for some steps, then runs out of memory.

After each step it records the digest of its weights."""

import argparse
import hashlib

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--raise-at",
    type=int,
    default=None,
    metavar="STEP",
    help="where there is no device to fill: raise the error at this step",
)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
fills = device.type == "cuda" and args.raise_at is None
width = 256 if fills else 8
model = nn.Sequential(
    nn.Conv2d(3, width, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(width, width, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(width, 10),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
batch, step = 32 if fills else 2, 0
with open("steps", "w", buffering=1) as steps:
    while True:
        if step == args.raise_at:
            raise torch.OutOfMemoryError("there is no device here that could be full")
        images, labels = (
            torch.randn(batch, 3, 64, 64, device=device),
            torch.randint(0, 10, (batch,), device=device),
        )
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        content = b"".join(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for tensor in model.state_dict().values()
        )
        steps.write(f"{step} {hashlib.sha256(content).hexdigest()}\n")
        if step % 5 == 0 and fills:
            batch *= 2
