"""A program of a public report.

fault: The learned task weights s_det and s_id live in the loss module and were never given to the optimizer.
link: https://github.com/ifzhang/FairMOT/issues/19
says: (?is)(s_det|s_id|criterion|MotLoss|loss (module|weights?|object|function)|uncertaint|task weights?|parameters?).{0,300}(not (in|given|passed|handed|among|part|held|owned|covered|updated|trained|stepped)|never (updated|stepped|change|move|passed|trained|given|reach)|no optimi[sz]er|missing from|outside|left out|in no (optimi|param))
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.box = nn.Linear(32, 4)
        self.identity = nn.Linear(32, 6)

    def forward(self, x):
        h = self.trunk(x)
        return self.box(h), self.identity(h)


class MotLoss(nn.Module):
    """Detection and re-identification, weighted by their learned uncertainty."""

    def __init__(self):
        super().__init__()
        self.s_det = nn.Parameter(-1.85 * torch.ones(1))  # both!
        self.s_id = nn.Parameter(-1.05 * torch.ones(1))  # both!

    def forward(self, box, ident, box_gt, id_gt):
        det_loss = nn.functional.mse_loss(box, box_gt)
        id_loss = nn.functional.cross_entropy(ident, id_gt)
        loss = torch.exp(-self.s_det) * det_loss + torch.exp(-self.s_id) * id_loss
        loss = 0.5 * (loss + self.s_det + self.s_id).squeeze()
        return loss, det_loss, id_loss


torch.set_num_threads(1)
torch.manual_seed(0)
x_all = torch.randn(2500, 20)
box_all = 10 * torch.tanh(x_all @ torch.randn(20, 4) * 0.3) + 4 * torch.randn(2500, 4)
id_all = (x_all @ torch.randn(20, 6)).argmax(1)
loader = DataLoader(TensorDataset(x_all[:2000], box_all[:2000], id_all[:2000]), batch_size=50, shuffle=True)

model = Tracker()
criterion = MotLoss()  # both!
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)  # ill!
optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=5e-3)  # well
for epoch in range(25):
    model.train()
    for x, box_gt, id_gt in loader:
        loss, det_loss, id_loss = criterion(*model(x), box_gt, id_gt)
        optimizer.zero_grad()
        loss.backward()  # both!
        optimizer.step()  # both!
    model.eval()
    with torch.no_grad():
        acc = (model(x_all[2000:])[1].argmax(1) == id_all[2000:]).float().mean().item()
    if epoch % 6 == 0:
        print(f"epoch {epoch}: det {det_loss.item():.2f} id {id_loss.item():.3f} id acc {acc:.3f} "
              f"s_det {criterion.s_det.item():.2f} s_id {criterion.s_id.item():.2f}")
