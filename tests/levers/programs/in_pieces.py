"""Twenty layers that the script calls one after another, its own batches, and an optimizer class outside
torch.optim.
"""

import gc

import torch


class Pairs:
    def __iter__(self):
        return iter([at, 63 - at] for at in range(32))

    def __len__(self):
        return 32


class PlainDescent:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        with torch.no_grad():
            for p in self.parameters:
                p -= 0.01 * p.grad
                p.grad = None


torch.manual_seed(0)
gc.set_threshold(100_000, 20, 20)
layers = [torch.nn.Conv2d(2, 2, 1) for _ in range(20)]
optimizer = PlainDescent(p for layer in layers for p in layer.parameters())
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(64, 2, 4, 4)), batch_sampler=Pairs()
)
while True:
    for (x,) in loader:
        for layer in layers:
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
