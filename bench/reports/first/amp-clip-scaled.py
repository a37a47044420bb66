"""A program of a public report.

fault: The gradient norm is clipped while the gradients are still multiplied by the GradScaler loss scale (no unscale_), so updates become about 65536 times too small.
link: https://github.com/Lightning-AI/pytorch-lightning/issues/9599
says: (?is)clip.{0,300}(unscal|scal)|(unscal|scaled|scaler|loss[- ]scale).{0,300}clip
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
proj = torch.randn(32, 8)
x_all = torch.randn(3000, 32)
y_all = (x_all @ proj + 0.5 * torch.randn(3000, 8)).argmax(1)
train = DataLoader(TensorDataset(x_all[:2500], y_all[:2500]), batch_size=50, shuffle=True)
x_val, y_val = x_all[2500:], y_all[2500:]

model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu")
max_norm = 1.0  # both!


def train_step(x, y):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()  # both!
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # ill!
    scaler.unscale_(optimizer)  # well
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # well
    scaler.step(optimizer)  # both!
    scaler.update()
    return loss.item()


for epoch in range(6):
    model.train()
    losses = [train_step(x, y) for x, y in train]
    model.eval()
    with torch.no_grad():
        acc = (model(x_val).argmax(1) == y_val).float().mean().item()
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}  val acc {acc:.3f}")
