"""Variants on a CUDA device, selected by an argument:

`choices` makes choices itself, `pieces` calls its layers one by one, `products` has no convolution, `tensors`
no loader.
"""

import os
import sys

import torch

device, kind = os.environ.get("DEVICE", "cuda"), sys.argv[1]
torch.manual_seed(0)


class Backwards(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(63, -1, -1))

    def __len__(self):
        return 64


data = torch.utils.data.TensorDataset(torch.randn(64, 4, 4, 4))
if kind == "choices":
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.Flatten(), torch.nn.Linear(64, 1)).to(
        device
    )
    model.compile(backend="eager")
    loader = torch.utils.data.DataLoader(data, batch_size=8)
elif kind == "pieces":
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    layers = torch.nn.ModuleList(torch.nn.Conv2d(4, 4, 1) for _ in range(20)).to(device)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=Backwards())
else:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1)).to(device)
    loader = [data[:8]] if kind == "tensors" else list(torch.utils.data.DataLoader(data, batch_size=8))
optimizer = torch.optim.SGD(layers.parameters() if kind == "pieces" else model.parameters(), lr=0.01)
while True:
    for (x,) in loader:
        x = x.to(device)
        optimizer.zero_grad()
        if kind == "pieces":
            for layer in layers:
                x = layer(x)
        else:
            x = model(x)
        x.square().mean().backward()
        optimizer.step()
