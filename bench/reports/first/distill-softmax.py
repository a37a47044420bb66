"""A program of a public report.

fault: nn.KLDivLoss receives softmax probabilities as its input where it expects log-probabilities.
link: https://github.com/sebastian-hofstaetter/matchmaker/issues/18
says: (?is)kl[_ ]?-?div\w*.{0,300}(log|probabilit|negative|below zero)|(log[- ]?prob|log[_ ]softmax|logarithm).{0,300}kl
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DistillLoss(nn.Module):
    """Match the student's class distribution to the teacher's."""

    def __init__(self):
        super().__init__()
        self.kl = nn.KLDivLoss(reduction="batchmean")  # both!

    def forward(self, student_logits, teacher_logits):
        return self.kl(student_logits.softmax(-1), teacher_logits.softmax(-1))  # ill!
        return self.kl(student_logits.log_softmax(-1), teacher_logits.softmax(-1))  # well


torch.set_num_threads(1)
torch.manual_seed(1)
inputs = torch.randn(3000, 12)
w = torch.randn(12, 5) * 0.5
labels = torch.distributions.Categorical(logits=inputs @ w).sample()
teacher = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 5))
student = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))

opt_t = torch.optim.Adam(teacher.parameters(), lr=3e-3, weight_decay=1e-3)
loader = DataLoader(TensorDataset(inputs[:2500], labels[:2500]), batch_size=50, shuffle=True)
for epoch in range(8):
    for x, y in loader:
        opt_t.zero_grad()
        nn.functional.cross_entropy(teacher(x), y).backward()
        opt_t.step()
teacher.eval().requires_grad_(False)

criterion = DistillLoss()
opt_s = torch.optim.Adam(student.parameters(), lr=3e-3)
x_val, y_val = inputs[2500:], labels[2500:]
for epoch in range(15):
    student.train()
    total = 0.0
    for x, _ in loader:
        loss = criterion(student(x), teacher(x))  # both!
        opt_s.zero_grad()
        loss.backward()
        opt_s.step()
        total += loss.item()
    student.eval()
    with torch.no_grad():
        nll = nn.functional.cross_entropy(student(x_val), y_val).item()
        nll_t = nn.functional.cross_entropy(teacher(x_val), y_val).item()
    print(f"epoch {epoch}: distill loss {total / len(loader):.4f}  "
          f"student val nll {nll:.3f}  teacher val nll {nll_t:.3f}")
