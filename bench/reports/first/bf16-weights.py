"""A program of a public report.

fault: The weights themselves are cast to bfloat16 before fine-tuning with a small learning rate, so nearly all updates are rounded away.
link: https://github.com/pytorch/ao/pull/1124
says: (?is)(bf16|bfloat16|half[- ]precision|low[- ]precision|16[- ]bit|precision).{0,300}(updat|round|lost|too small|vanish|swallow|unchanged|no effect|not (move|change)|did not (move|change)|master|resolution|step)|(updat|step|weights?).{0,250}(round(ed|ing|s)|bf16|bfloat16)
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                                    nn.Linear(64, 5))

    def forward(self, x):
        return self.layers(x)


def labelled(n, shift):
    x = torch.randn(n, 8)
    score = torch.stack([x[:, k] + shift * x[:, k + 3] for k in range(5)], 1)
    return x, score.argmax(1)


def fit(model, data, lr, epochs, name):
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)  # both!
    for epoch in range(epochs):
        total = 0.0
        for x, y in DataLoader(data, batch_size=32, shuffle=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()  # both!
            total += loss.item()
        if epoch % 4 == 3:
            print(f"{name} epoch {epoch}: loss {total * 32 / len(data):.4f}")


def accuracy(model, x, y):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return (model(x).argmax(1) == y).float().mean().item()


model = Regressor()
fit(model, TensorDataset(*labelled(2000, 0.0)), lr=1e-3, epochs=4, name="base")
x_test, y_test = labelled(1000, -1.5)
print("before fine-tuning", accuracy(model, x_test, y_test))
model = model.to(torch.bfloat16)  # ill!
model = model.to(torch.float32)  # well
fit(model, TensorDataset(*labelled(2000, -1.5)), lr=5e-5, epochs=16, name="fine-tune")  # both!
print("after fine-tuning", accuracy(model, x_test, y_test))
