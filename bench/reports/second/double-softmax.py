"""A program of a public report.

fault: The network already applies softmax in forward and its output goes into nn.CrossEntropyLoss, which applies log-softmax again.
link: https://github.com/jindongwang/Deep-learning-activity-recognition/issues/10
says: (?is)(double|twice|two|second|again|already).{0,120}softmax|softmax.{0,200}(twice|again|double|already|second|before|cross[_ -]?entropy|logits)|cross[_ -]?entropy\w*.{0,250}(softmax|probabilit|logits|sum(s|ming)? to (one|1)|normali[sz]ed)|(probabilit|sum(s|ming)? to (one|1)).{0,250}(cross[_ -]?entropy|logits)
kind: correctness
"""
"""Activity recognition from a phone's motion sensors (9 channels, windows of 128 readings)."""
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument('--nepoch', type=int, default=8)
parser.add_argument('--batchsize', type=int, default=64)
parser.add_argument('--lr', type=float, default=.01)
parser.add_argument('--momentum', type=float, default=.9)
parser.add_argument('--save', type=str, default='/tmp/har_model.pkl')
args = parser.parse_args()


class Network(nn.Module):
    def __init__(self):
        super(Network, self).__init__()
        self.conv1 = nn.Sequential(
            nn.Conv2d(in_channels=9, out_channels=32, kernel_size=(1, 9)),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=(1, 2), stride=2))
        self.conv2 = nn.Sequential(
            nn.Conv2d(in_channels=32, out_channels=64, kernel_size=(1, 9)),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=(1, 2), stride=2))
        self.fc1 = nn.Sequential(nn.Linear(in_features=64 * 26, out_features=200), nn.ReLU())
        self.fc2 = nn.Sequential(nn.Linear(in_features=200, out_features=100), nn.ReLU())
        self.fc3 = nn.Linear(in_features=100, out_features=6)  # both!

    def forward(self, x):
        out = self.conv1(x)
        out = self.conv2(out)
        out = out.reshape(-1, 64 * 26)
        out = self.fc1(out)
        out = self.fc2(out)
        out = self.fc3(out)  # both!
        out = F.softmax(out, dim=1)  # ill!
        return out  # both!


def load_windows(n, rng):
    y = rng.integers(0, 6, n)
    t = np.arange(128) / 50.0
    freq = np.array([1.6, 2.0, 1.3, 0.0, 0.05, 0.02])[y]
    amp = np.array([1.0, 1.2, 1.1, 0.1, 0.1, 0.1])[y]
    phase = rng.uniform(0, 2 * np.pi, (n, 9, 1))
    x = amp[:, None, None] * np.sin(2 * np.pi * freq[:, None, None] * t + phase)
    gravity = np.zeros((6, 9))
    gravity[3, 0], gravity[4, 1], gravity[5, 2] = 1.0, 1.0, 1.0
    x = x + gravity[y][:, :, None] + rng.normal(0, 0.6, (n, 9, 128))
    x = torch.tensor(x, dtype=torch.float32).reshape(n, 9, 1, 128)
    return TensorDataset(x, torch.tensor(y, dtype=torch.long))


def test(model, test_loader):
    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for sample, target in test_loader:
            output = model(sample)
            _, predicted = torch.max(output.data, 1)
            total += target.size(0)
            correct += (predicted == target).sum().item()
    return 100. * correct / total


def train(model, optimizer, train_loader, test_loader):
    criterion = nn.CrossEntropyLoss()  # both!
    for e in range(args.nepoch):
        model.train()
        correct, total, total_loss = 0, 0, 0
        for sample, target in train_loader:
            output = model(sample)
            loss = criterion(output, target)  # both!
            optimizer.zero_grad()
            loss.backward()  # both!
            optimizer.step()
            total_loss += loss.item()
            _, predicted = torch.max(output.data, 1)
            total += target.size(0)
            correct += (predicted == target).sum().item()
        acc_test = test(model, test_loader)
        print('Epoch: [{}/{}], loss: {:.4f}, train acc: {:.2f}%, test acc: {:.2f}%'.format(
            e + 1, args.nepoch, total_loss / len(train_loader), 100. * correct / total, acc_test))
        torch.save(model.state_dict(), args.save)


if __name__ == '__main__':
    torch.manual_seed(10)
    rng = np.random.default_rng(10)
    train_loader = DataLoader(load_windows(1800, rng), batch_size=args.batchsize, shuffle=True, drop_last=True)
    test_loader = DataLoader(load_windows(600, rng), batch_size=args.batchsize)
    model = Network()
    optimizer = optim.SGD(params=model.parameters(), lr=args.lr, momentum=args.momentum)
    train(model, optimizer, train_loader, test_loader)
