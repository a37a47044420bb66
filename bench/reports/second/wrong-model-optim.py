"""A program of a public report.

fault: The optimizer of the DoRA run is given the parameters of the LoRA model, so the DoRA model is never updated.
link: https://github.com/rasbt/dora-from-scratch/pull/1
says: (?is)optimi[sz]er.{0,300}(not (in|given|hold|contain|part)|other|another|different|wrong|none of|no param|does(n't| not)|never|missing|lacks|model_lora|without|not one|belong)|(param\w*|weights?|model|adapter|gradient).{0,250}(not (in|given to|part of|held by|known to|passed to|handed to|among)|never (updat|chang|mov|step|train)|did(n't| not) (chang|mov)|unchanged|no optimi[sz]er|outside|not (updat|chang|train)ed|accumulat)
kind: correctness
"""
"""Compare LoRA and DoRA on a pretrained multilayer perceptron."""
import copy
import os
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_EPOCHS = 2


def mnist(prefix, start, stop, rotate=False, root=os.environ['DATA'] + '/mnist/MNIST/raw/'):
    x = np.fromfile(root + prefix + '-images-idx3-ubyte', dtype=np.uint8)[16:].reshape(-1, 28, 28)[start:stop]
    y = np.fromfile(root + prefix + '-labels-idx1-ubyte', dtype=np.uint8)[8:][start:stop].astype(np.int64)
    if rotate:
        x = np.rot90(x, axes=(1, 2)).copy()
    return TensorDataset(torch.from_numpy(x.reshape(len(x), -1).astype(np.float32) / 255), torch.from_numpy(y))


class MultilayerPerceptron(nn.Module):
    def __init__(self, num_features, num_hidden_1, num_hidden_2, num_classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_features, num_hidden_1), nn.ReLU(),
            nn.Linear(num_hidden_1, num_hidden_2), nn.ReLU(),
            nn.Linear(num_hidden_2, num_classes))

    def forward(self, x):
        return self.layers(x)


class LoRALayer(nn.Module):
    def __init__(self, in_dim, out_dim, rank, alpha):
        super().__init__()
        std_dev = 1 / torch.sqrt(torch.tensor(rank).float())
        self.A = nn.Parameter(torch.randn(in_dim, rank) * std_dev)
        self.B = nn.Parameter(torch.zeros(rank, out_dim))
        self.alpha = alpha

    def forward(self, x):
        return self.alpha * (x @ self.A @ self.B)


class LinearWithLoRA(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear
        self.lora = LoRALayer(linear.in_features, linear.out_features, rank, alpha)

    def forward(self, x):
        return self.linear(x) + self.lora(x)


class LinearWithDoRA(LinearWithLoRA):
    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        self.m = nn.Parameter(linear.weight.detach().norm(p=2, dim=0, keepdim=True))

    def forward(self, x):
        lora = self.lora.alpha * (self.lora.A @ self.lora.B)
        numerator = self.linear.weight + lora.T
        directional = numerator / numerator.norm(p=2, dim=0, keepdim=True)
        return F.linear(x, self.m * directional, self.linear.bias)


def adapt(model, layer):
    for i in (0, 2, 4):
        model.layers[i] = layer(model.layers[i], rank=4, alpha=8)
    return model


def freeze_linear_layers(model):
    for child in model.children():
        if isinstance(child, nn.Linear):
            for param in child.parameters():
                param.requires_grad = False
        else:
            freeze_linear_layers(child)


def compute_accuracy(model, data_loader):
    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for features, targets in data_loader:
            correct += (model(features).argmax(1) == targets).sum().item()
            total += targets.size(0)
    return correct / total * 100


def train(name, num_epochs, model, optimizer, train_loader, test_loader, out):
    start_time = time.time()
    for epoch in range(num_epochs):
        model.train()
        for batch_idx, (features, targets) in enumerate(train_loader):
            logits = model(features)
            loss = F.cross_entropy(logits, targets)
            optimizer.zero_grad()  # both!
            loss.backward()
            optimizer.step()  # both!
            if not batch_idx % 40:
                print('%s Epoch: %03d/%03d | Batch %03d/%03d | Loss: %.4f' % (
                    name, epoch + 1, num_epochs, batch_idx, len(train_loader), loss.item()))
        print('%s test accuracy: %.2f%%, time elapsed: %.2f s' % (
            name, compute_accuracy(model, test_loader), time.time() - start_time))
    torch.save(model.state_dict(), os.path.join(out, name + '.pt'))


if __name__ == '__main__':
    torch.manual_seed(123)
    out = tempfile.mkdtemp()
    train_loader = DataLoader(mnist('train', 0, 4800), batch_size=64, shuffle=True)
    test_loader = DataLoader(mnist('t10k', 0, 1500), batch_size=256)
    tune_loader = DataLoader(mnist('train', 4800, 9600, rotate=True), batch_size=64, shuffle=True)
    tune_test_loader = DataLoader(mnist('t10k', 0, 1500, rotate=True), batch_size=256)

    model_pretrained = MultilayerPerceptron(784, 128, 64, 10)
    optimizer_pretrained = torch.optim.Adam(model_pretrained.parameters(), lr=0.002)
    train('pretrained', NUM_EPOCHS, model_pretrained, optimizer_pretrained, train_loader, test_loader, out)

    model_lora = adapt(copy.deepcopy(model_pretrained), LinearWithLoRA)
    freeze_linear_layers(model_lora)
    optimizer_lora = torch.optim.Adam(model_lora.parameters(), lr=0.002)
    train('lora', NUM_EPOCHS, model_lora, optimizer_lora, tune_loader, tune_test_loader, out)

    model_dora = adapt(copy.deepcopy(model_pretrained), LinearWithDoRA)  # both!
    freeze_linear_layers(model_dora)  # both!
    optimizer_dora = torch.optim.Adam(model_lora.parameters(), lr=0.002)  # ill!
    optimizer_dora = torch.optim.Adam(model_dora.parameters(), lr=0.002)  # well
    train('dora', NUM_EPOCHS, model_dora, optimizer_dora, tune_loader, tune_test_loader, out)  # both!
