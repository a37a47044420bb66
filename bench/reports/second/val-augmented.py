"""A program of a public report.

fault: The validation subset is taken from the training dataset with its random crop and erasing, so validation images are augmented.
link: https://github.com/gpleiss/efficient_densenet_pytorch/issues/51
says: (?is)(valid|eval|held[- ]?out|\btest).{0,300}(augment|random(ly)?|transform|differ(s|ent|ed)?|not (the same|determin|repeat|reproduc)|crop|eras|change)|(augment|random (crop|eras|transform)|transform).{0,250}(valid|eval|held[- ]?out|test)|same (index|sample|item|image|row).{0,150}(differ|chang|not the same)
kind: correctness
"""
"""Train a small DenseNet on digits, with a validation set held out of the training images."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


class RandomCrop:
    def __init__(self, size, padding):
        self.size, self.padding = size, padding

    def __call__(self, x):
        x = F.pad(x, [self.padding] * 4)
        i, j = torch.randint(0, x.size(1) - self.size + 1, (2,)).tolist()
        return x[:, i:i + self.size, j:j + self.size]


class RandomErasing:
    def __call__(self, x):
        i, j = torch.randint(0, 18, (2,)).tolist()
        x = x.clone()
        x[:, i:i + 10, j:j + 10] = 0
        return x


class Normalize:
    def __init__(self, mean, stdv):
        self.mean, self.stdv = mean, stdv

    def __call__(self, x):
        return (x - self.mean) / self.stdv


class Digits(Dataset):
    def __init__(self, root, train, transform, limit):
        prefix = os.path.join(root, 'MNIST/raw', 'train' if train else 't10k')
        images = np.fromfile(prefix + '-images-idx3-ubyte', dtype=np.uint8)[16:].reshape(-1, 1, 28, 28)[:limit]
        self.images = torch.from_numpy(images.astype(np.float32) / 255)
        self.labels = np.fromfile(prefix + '-labels-idx1-ubyte', dtype=np.uint8)[8:][:limit].astype(np.int64)
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i]), self.labels[i]


class DenseNet(nn.Module):
    def __init__(self, growth=8, layers=3):
        super().__init__()
        self.conv0 = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.layers = nn.ModuleList()
        ch = 16
        for _ in range(layers):
            self.layers.append(nn.Sequential(nn.BatchNorm2d(ch), nn.ReLU(), nn.Conv2d(ch, growth, 3, padding=1)))
            ch += growth
        self.norm = nn.BatchNorm2d(ch)
        self.classifier = nn.Linear(ch * 9, 10)

    def forward(self, x):
        x = self.conv0(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.classifier(F.adaptive_avg_pool2d(F.relu(self.norm(x)), 3).flatten(1))


def run_epoch(model, loader, optimizer=None):
    model.train(optimizer is not None)
    losses, error, n = 0., 0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for input, target in loader:
            output = model(input)
            loss = F.cross_entropy(output, target)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses += loss.item() * target.size(0)
            error += (output.argmax(1) != target).sum().item()
            n += target.size(0)
    return losses / n, error / n


def demo(data=os.environ['DATA'] + '/mnist', save=None, valid_size=600, n_epochs=4, batch_size=50, seed=1):
    torch.manual_seed(seed)
    save = save or tempfile.mkdtemp()
    normalize = Normalize(0.1307, 0.3081)
    train_transforms = Compose([RandomCrop(28, padding=4), RandomErasing(), normalize])  # both!
    test_transforms = Compose([normalize])

    train_set = Digits(data, train=True, transform=train_transforms, limit=3000)  # both!
    test_set = Digits(data, train=False, transform=test_transforms, limit=1000)
    indices = torch.randperm(len(train_set))
    train_indices = indices[:len(indices) - valid_size].tolist()
    valid_indices = indices[len(indices) - valid_size:].tolist()  # both!
    valid_set = Subset(train_set, valid_indices)  # ill!
    valid_set = Subset(Digits(data, train=True, transform=test_transforms, limit=3000), valid_indices)  # well
    train_set = Subset(train_set, train_indices)

    train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=batch_size, shuffle=False)  # both!
    test_loader = DataLoader(test_set, batch_size=batch_size, shuffle=False)
    model = DenseNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    best_error = 1
    for epoch in range(n_epochs):
        train_loss, train_error = run_epoch(model, train_loader, optimizer)
        valid_loss, valid_error = run_epoch(model, valid_loader)  # both!
        print('%03d, train %.6f %.5f, valid %.6f %.5f' % (epoch + 1, train_loss, train_error, valid_loss, valid_error))
        if valid_error < best_error:
            best_error = valid_error
            torch.save(model.state_dict(), os.path.join(save, 'model.dat'))
    model.load_state_dict(torch.load(os.path.join(save, 'model.dat'), weights_only=True))
    print('Final test loss %.5f error: %.4f' % run_epoch(model, test_loader))


if __name__ == '__main__':
    demo()
