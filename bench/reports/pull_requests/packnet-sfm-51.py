"""A depth network whose outputs are collected for the end of the epoch.

fault: each collected output has the loss with its graph
codes: FL202 FL251
kind: performance
"""
import torch
from torch import nn


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1))

    def training_step(self, images, depths):
        return {"loss": (self.layers(images) - depths).abs().mean(), "count": len(images)}


torch.manual_seed(0)
images, depths = torch.rand(256, 3, 32, 32), torch.rand(256, 1, 32, 32)
model = Depth()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1000):
    outputs = []
    for step in range(2000):
        at = torch.randint(len(images), (8,))
        optimizer.zero_grad()
        output = model.training_step(images[at], depths[at])
        output["loss"].backward()
        optimizer.step()
        output["loss"] = output["loss"].detach()  # well
        outputs.append(output)  # ill!
        outputs.append(output)  # well
    print(epoch, sum(each["loss"].item() for each in outputs) / len(outputs))
