"""A program of a public report.

fault: the frozen backbone is in training mode: its batch-norm statistics change
link: https://github.com/kdexd/virtex/issues/16
says: (?i)batch.?norm|running (statistics|mean|var)|statistics|buffers?.{0,40}(chang|updat)|frozen|train(ing)? mode|eval\(\)
kind: correctness
"""
"""Linear evaluation: a classifier on the features of a frozen, pretrained backbone."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def backbone():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )


class Probe(nn.Module):
    def __init__(self, visual, classes):
        super().__init__()
        self.visual = visual
        self.fc = nn.Linear(128, classes)
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images):
        return self.fc(self.visual(images))


def make_images(count, classes, seed, shapes_seed, brightness):
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.rand(classes, 3, 6, 6, generator=torch.Generator().manual_seed(shapes_seed))
    labels = torch.randint(0, classes, (count,), generator=generator)
    images = nn.functional.interpolate(shapes[labels], size=24)
    return TensorDataset(images + brightness + 1.5 * torch.randn(images.shape, generator=generator), labels)


def pretrain(visual):
    model = nn.Sequential(visual, nn.Linear(128, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for images, labels in DataLoader(make_images(1600, 20, 1, 10, 0.0), batch_size=32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return visual


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return right / len(loader.dataset)


def train_linear(model, train_loader, val_loader, epochs):
    for parameter in model.visual.parameters():
        parameter.requires_grad = False  # both!
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.005, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [40, 80], 0.1)
    for epoch in range(epochs):
        model.train()  # both!
        model.visual.eval()  # well
        total = 0.0
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        print(f"epoch {epoch} loss {total / len(train_loader):.4f} top-1 {evaluate(model, val_loader):.3f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Probe(pretrain(backbone()), 10)
    train_loader = DataLoader(make_images(1000, 10, 2, 11, 0.3), batch_size=32, shuffle=True)
    val_loader = DataLoader(make_images(400, 10, 3, 11, 0.3), batch_size=100)
    train_linear(model, train_loader, val_loader, 5000)
