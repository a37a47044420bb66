"""Learning from a replay buffer.

fault: the buffer grows with each step and is copied each time
codes: FL251 FL170 FL167
"""
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
replay = torch.randn(1024, 64)

for step in range(20_000):
    state = torch.randn(256, 64)
    replay = torch.cat([replay, state])  # ill!
    replay = torch.cat([replay[256:], state])  # well
    at = torch.randint(len(replay), (128,))
    optimizer.zero_grad()
    loss = nn.functional.smooth_l1_loss(model(replay[at]), replay[at].roll(1, 1))
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, len(replay), loss.item())
