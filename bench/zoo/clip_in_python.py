"""A deep recurrent network with clipped gradients.

fault: the norm is taken parameter by parameter and fetched each time
codes: FL101
"""
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
wave = torch.randn(2048, 24, 16, device=device).cumsum(1)
model = nn.LSTM(16, 64, num_layers=3, batch_first=True).to(device)
head = nn.Linear(64, 16).to(device)
parameters = [*model.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.05)
for step in range(100_000):
    batch = wave[torch.randint(len(wave), (16,), device=device)]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(head(model(batch[:, :-1])[0]), batch[:, 1:])
    loss.backward()
    norm = 0.0  # ill
    for parameter in parameters:  # ill
        norm += parameter.grad.norm(2).item() ** 2  # ill!
    norm = norm**0.5  # ill
    for parameter in parameters:  # ill
        parameter.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))  # ill
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # well
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
