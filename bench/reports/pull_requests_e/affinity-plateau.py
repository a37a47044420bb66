"""A program of a public report.

fault: ReduceLROnPlateau with mode max is stepped with a loss, so the rate falls while the loss improves
link: https://github.com/RMeli/gnina-torch/pull/57
says: (?i)ReduceLROnPlateau|plateau|mode.{0,12}(max|min)|(learning rate|\blr\b).{0,80}(fall|fell|drop|decay|reduc|cut|vanish|collaps|small|tiny|while|zero)
kind: correctness
"""
"""Scores poses of ligands in a pocket and predicts their affinity; the rate follows the training loss."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PoseNet(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(4, channels, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2),
            nn.Conv3d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten(),
        )
        self.pose, self.affinity = nn.Linear(2 * channels * 8, 2), nn.Linear(2 * channels * 8, 1)

    def forward(self, grids):
        features = self.features(grids)
        return nn.functional.log_softmax(self.pose(features), 1), self.affinity(features)[:, 0]


def make_grids(count, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    charges = torch.randn(count, 4, generator=generator)
    grids = torch.randn(count, 4, 8, 8, 8, generator=generator) + 0.3 * charges[:, :, None, None, None]
    scores = charges @ weight
    return TensorDataset(grids, (scores[:, 0] + 0.3 * torch.randn(count, generator=generator) > 0).long(), scores[:, 1])


def losses(model, batch):
    grids, labels, affinities = batch
    pose, affinity = model(grids)
    return nn.functional.nll_loss(pose, labels), nn.functional.smooth_l1_loss(affinity, affinities), pose


def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(3)
    with torch.no_grad():
        for batch in loader:
            pose_loss, affinity_loss, pose = losses(model, batch)
            size = len(batch[0])
            sums += torch.tensor([pose_loss * size, affinity_loss * size, (pose.argmax(1) == batch[1]).sum()])
    pose_loss, affinity_loss, accuracy = (sums / len(loader.dataset)).tolist()
    return {"Pose Loss": pose_loss, "Affinity Loss": affinity_loss, "Accuracy": accuracy}


def training(lr=0.01, momentum=0.9, lr_reduce=0.5, lr_patience=2, lr_min=0.0):
    train = DataLoader(make_grids(512, 1), batch_size=32, shuffle=True)
    train_check, test = DataLoader(train.dataset, batch_size=128), DataLoader(make_grids(256, 2), batch_size=128)
    model = PoseNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(  # both!
        optimizer,  # both!
        mode="max",  # ill!
        mode="min",  # well
        factor=lr_reduce,  # both!
        patience=lr_patience,  # both!
        min_lr=lr_min,  # both!
    )
    for epoch in range(10_000):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            pose_loss, affinity_loss, _ = losses(model, batch)
            (pose_loss + affinity_loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10)
            optimizer.step()
        metrics = evaluate(model, train_check)
        scheduler.step(metrics["Pose Loss"] + metrics["Affinity Loss"])  # both!
        if epoch % 2 == 0:
            checked = evaluate(model, test)
            print(f"epoch {epoch} train {metrics['Pose Loss']:.4f} {metrics['Affinity Loss']:.4f} test {checked['Pose Loss']:.4f} "
                  f"{checked['Accuracy']:.3f} lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    training()
