"""LBFGS over a gradient penalty: every loss is differentiated twice. Batches are taken from their loader
under no_grad; activations are in place.

A threshold of 0 switches the garbage collector off.
"""

import gc
from itertools import cycle

import torch

torch.manual_seed(0)
gc.set_threshold(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(inplace=True), torch.nn.Flatten(), torch.nn.Linear(144, 1)
)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8)), batch_size=8)
batches = cycle(loader)
while True:
    with torch.no_grad():
        (x,) = next(batches)
    x.requires_grad_(True)

    def closure(x=x):
        optimizer.zero_grad()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = score.square().mean() + slope.square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
