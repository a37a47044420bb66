"""A program of a public report.

fault: All checkpoint keys carry a 'model.' prefix and strict=False hides that not one of them was loaded.
link: https://github.com/pytorch/examples/issues/1029
says: (?is)(load_state_dict|checkpoint|state[_ ]dict|strict|keys?).{0,300}(none of|\b0 of|no (key|param|weight|tensor)|not one|missing|unexpected|prefix|not loaded|(no|not) match|unchanged|nothing|not one|did not change|ignored|skipp)
kind: correctness
"""
import io

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


class LitModule(nn.Module):
    # the wrapper the pre-training job used
    def __init__(self):
        super().__init__()
        self.model = Encoder()

    def training_step(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)


def pretrain(x, y):
    lit = LitModule()
    opt = torch.optim.Adam(lit.parameters(), lr=2e-3)
    for epoch in range(12):
        for idx in torch.randperm(len(x)).split(64):
            opt.zero_grad()
            lit.training_step(x[idx], y[idx]).backward()
            opt.step()
    buf = io.BytesIO()
    torch.save({"epoch": 12, "state_dict": lit.state_dict()}, buf)  # both!
    buf.seek(0)
    return buf


torch.set_num_threads(1)
torch.manual_seed(0)
rule = nn.Sequential(nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 10)).requires_grad_(False)
x_big = torch.randn(4000, 40)
y_big = rule(x_big).argmax(1)
ckpt = torch.load(pretrain(x_big, y_big))  # both!

net = Encoder()
net.load_state_dict(ckpt["state_dict"], strict=False)  # ill!
net.load_state_dict({k.removeprefix("model."): v for k, v in ckpt["state_dict"].items()})  # well
x_small, x_test = torch.randn(200, 40), torch.randn(1000, 40)   # a few examples of the same task
y_small, y_test = rule(x_small).argmax(1), rule(x_test).argmax(1)
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
for epoch in range(20):
    for idx in torch.randperm(200).split(20):
        loss = nn.functional.cross_entropy(net(x_small[idx]), y_small[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
with torch.no_grad():
    print("fine-tuned test accuracy", (net(x_test).argmax(1) == y_test).float().mean().item())
