"""A program of a public report.

fault: Predictions of shape (N,) are compared with labels of shape (N, 1), which broadcasts to (N, N) and makes the accuracy meaningless (above 1).
link: https://github.com/traja-team/traja/issues/57
says: (?is)broadcast|(\(10,? ?1?\)|\[10(, ?1)?\]).{0,200}(\(10, ?10\)|\[10, ?10\]|10x10|10 x 10)|(compar|==|shape).{0,250}(every (label|pair|target)|all pairs|pairwise|outer|\(?n, ?n\)?)|accurac.{0,120}(above|greater|more than|exceed|over|beyond|>|outside|larger).{0,20}1
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Trajectories(Dataset):
    """Walks of 30 steps; the class (three species) sits in a column, as the CSV had it."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 3, (n, 1), generator=g)  # both!
        speed = 0.5 + 0.25 * self.label.float()
        self.path = (speed.unsqueeze(2) * torch.randn(n, 30, 2, generator=g)).cumsum(1)

    def __len__(self):
        return len(self.path)

    def __getitem__(self, i):
        return self.path[i], self.label[i]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 24, batch_first=True)
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        return self.out(self.gru(x.diff(dim=1).abs())[0].mean(1))


def validate(model, loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for path, classes in loader:
            predicted = model(path).argmax(1)  # both!
            correct += (predicted == classes).sum().item()  # ill!
            correct += (predicted == classes.squeeze(1)).sum().item()  # well
            total += len(classes)  # both!
    return correct / total  # both!


torch.set_num_threads(1)
torch.manual_seed(0)
train = DataLoader(Trajectories(900, 0), batch_size=30, shuffle=True)
val = DataLoader(Trajectories(300, 1), batch_size=10)
model = Classifier()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
best = -1.0
for epoch in range(8):
    model.train()
    for path, classes in train:
        loss = nn.functional.cross_entropy(model(path), classes.squeeze(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    acc = validate(model, val)  # both!
    if acc > best:
        best = acc
    print(f"epoch {epoch}: loss {loss.item():.3f}  val accuracy {acc:.3f}  best {best:.3f}")
