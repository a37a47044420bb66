"""A convolutional network on small images.

fault: many more threads than the machine has cores
codes: FL158
"""
import torch
from torch import nn

torch.set_num_threads(24)  # ill!
torch.manual_seed(0)
images, labels = torch.randn(1024, 3, 28, 28), torch.randint(0, 5, (1024,))
model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 144, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    at = torch.randint(len(images), (48,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[at]), labels[at])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
