"""A program of a public report.

fault: optimizer.zero_grad is called on every micro-batch, so only the last of eight micro-batches reaches each update.
link: https://github.com/bytetriper/RAE/issues/67
says: (?is)(zero_grad|gradients?).{0,300}(micro|accumul|thrown away|discard|lost|wip(ed|es)|eras|never (used|applied|stepped)|only the last|without (an? |any )?(optimi[sz]er )?step|before .{0,40}step|unused)
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUM_STEPS = 8          # 8 micro-batches of 8 make one update of 64
MICRO_BATCH = 8


def make_data(n):
    x = torch.randn(n, 16)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n)
    return x, y.unsqueeze(1)


torch.set_num_threads(1)
torch.manual_seed(3)
x_train, y_train = make_data(4096)
x_val, y_val = make_data(1000)
loader = DataLoader(TensorDataset(x_train, y_train), batch_size=MICRO_BATCH, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = nn.MSELoss()

updates = 0
for epoch in range(10):
    model.train()
    epoch_loss = 0.0
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)  # ill!
        if step % ACCUM_STEPS == 0:  # well
            optimizer.zero_grad(set_to_none=True)  # well
        loss = loss_fn(model(x), y)
        (loss / ACCUM_STEPS).backward()  # both!
        epoch_loss += loss.item()
        if (step + 1) % ACCUM_STEPS == 0:
            optimizer.step()  # both!
            updates += 1
    model.eval()
    with torch.no_grad():
        val = loss_fn(model(x_val), y_val).item()
    print(f"epoch {epoch}: {updates} updates, train {epoch_loss / len(loader):.4f}, val {val:.4f}")
