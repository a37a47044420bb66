"""A program of a public report.

fault: The EMA update copies only parameters, so the teacher keeps the initial batch-norm running statistics.
link: https://github.com/saltoricristiano/cosmix-uda/issues/21
says: (?is)(teacher|ema|average|momentum|copy|eval).{0,300}(buffer|running_?(mean|var)|running stat|batch[- _]?norm|statistic)|(buffer|running_?(mean|var)|running stat|batch[- _]?norm\w*|statistic).{0,300}(teacher|ema\b|average|momentum|copy|never updated|initial|default)
kind: correctness
"""
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MomentumUpdater:
    def __init__(self, tau=0.98):
        self.tau = tau

    @torch.no_grad()
    def update(self, student, teacher):
        for s, t in zip(student.parameters(), teacher.parameters()):  # ill!
        for s, t in zip(student.parameters(), teacher.parameters()):  # well
            t.mul_(self.tau).add_(s, alpha=1 - self.tau)  # both!
        for s, t in zip(student.buffers(), teacher.buffers()):  # well
            t.copy_(s)  # well


def build():
    return nn.Sequential(nn.Linear(10, 48), nn.BatchNorm1d(48), nn.ReLU(),
                         nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 3))


def accuracy(net, x, y):
    net.eval()
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


torch.set_num_threads(1)
torch.manual_seed(0)
centres = 3 * torch.randn(3, 10) + 8          # raw, un-normalised features
y_all = torch.randint(0, 3, (2600,))
x_all = centres[y_all] + 3 * torch.randn(2600, 10)
labelled = DataLoader(TensorDataset(x_all[:200], y_all[:200]), batch_size=20, shuffle=True)
unlabelled = x_all[200:2000]
x_test, y_test = x_all[2000:], y_all[2000:]

student = build()
teacher = copy.deepcopy(student).requires_grad_(False)  # both!
updater = MomentumUpdater()
opt = torch.optim.Adam(student.parameters(), lr=2e-3)
for epoch in range(25):
    student.train()
    teacher.eval()  # both!
    for x, y in labelled:
        u = unlabelled[torch.randint(0, len(unlabelled), (60,))]
        target = teacher(u).softmax(1)  # both!
        consistency = nn.functional.mse_loss(student(u + 0.3 * torch.randn_like(u)).softmax(1), target)
        loss = nn.functional.cross_entropy(student(x), y) + 0.5 * consistency
        opt.zero_grad()
        loss.backward()
        opt.step()
        updater.update(student, teacher)  # both!
    if epoch % 6 == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}  student {accuracy(student, x_test, y_test):.3f}"
              f"  teacher {accuracy(teacher, x_test, y_test):.3f}")
