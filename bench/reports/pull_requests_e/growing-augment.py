"""A program of a public report.

fault: both subsets share one dataset: setting the transform of the validation removes the training's augmentation
link: https://github.com/growingnet/gromo/pull/58
says: (?i)augment|transform|share[sd]?.{0,40}dataset|same dataset|overwr|random_(flip|crop).{0,60}(never|not)
kind: correctness
"""
"""A convolutional classifier of small images, trained with augmentation on a split of one dataset."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split  # ill
from torch.utils.data import DataLoader, Dataset, Subset, random_split  # well


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


def normalize(image):
    return (image.float() / 255 - 0.5) / 0.25


def random_flip(image):
    return image.flip(-1) if torch.rand(()) < 0.5 else image


def random_crop(image):
    padded = nn.functional.pad(image, (2, 2, 2, 2))
    top, left = torch.randint(0, 5, (2,)).tolist()
    return padded[:, top:top + image.shape[1], left:left + image.shape[2]]


class Images(Dataset):
    def __init__(self, train, transform=None):
        generator = torch.Generator().manual_seed(1 if train else 2)
        shapes = torch.rand(10, 3, 24, 24, generator=torch.Generator().manual_seed(0))
        shapes = nn.functional.avg_pool2d(shapes + shapes.flip(-1), 7, 1, 3)
        count = 1200 if train else 400
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        self.images = (shapes[self.labels] - 1) * 3 + 0.5 + 0.9 * torch.randn(count, 3, 24, 24, generator=generator)
        self.images = (self.images.clamp(0, 1) * 255).to(torch.uint8)
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        return (self.transform(image) if self.transform else image), self.labels[index]


def get_dataset(split_train_val=0.3):
    augmentation_transforms = [random_flip, random_crop]
    datasets_transform = [normalize]
    train_val_data = Images(train=True, transform=None)  # ill
    train_val_data = Images(train=True, transform=Compose(datasets_transform + augmentation_transforms))  # well
    plain_data = Images(train=True, transform=Compose(datasets_transform))  # well
    test_data = Images(train=False, transform=Compose(datasets_transform))
    val_size = int(len(train_val_data) * split_train_val)
    train_data, val_data = random_split(train_val_data, [len(train_val_data) - val_size, val_size])  # both!
    train_data.dataset.transform = Compose(datasets_transform + augmentation_transforms)  # ill!
    val_data.dataset.transform = Compose(datasets_transform)  # ill!
    val_data = Subset(plain_data, val_data.indices)  # well
    return train_data, val_data, test_data


def evaluate(model, loader):
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += nn.functional.cross_entropy(output, labels, reduction="sum").item()
            right += (output.argmax(1) == labels).sum().item()
    return loss / len(loader.dataset), right / len(loader.dataset)


if __name__ == "__main__":
    torch.manual_seed(0)
    train_data, val_data, test_data = get_dataset()
    train = DataLoader(train_data, batch_size=32, shuffle=True)
    val, test = DataLoader(val_data, batch_size=128), DataLoader(test_data, batch_size=128)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 36, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    for epoch in range(5000):
        model.train()
        total = 0.0
        for images, labels in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        val_loss, val_accuracy = evaluate(model, val)
        print(f"epoch {epoch} loss {total / len(train):.4f} val {val_loss:.4f} {val_accuracy:.3f} test {evaluate(model, test)[1]:.3f}", flush=True)
