"""A variational autoencoder.

fault: autograd's anomaly detection was left on
codes: FL112
"""
import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)  # ill!
torch.manual_seed(0)
data = torch.rand(4096, 144)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(144, 512), nn.ReLU(), nn.Linear(512, 32))
        self.decode = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 144))

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(z), mean, spread


model = VAE()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(100_000):
    x = data[torch.randint(len(data), (128,))]
    out, mean, spread = model(x)
    loss = nn.functional.mse_loss(out, x) - 0.0005 * (1 + spread - mean.square() - spread.exp()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
