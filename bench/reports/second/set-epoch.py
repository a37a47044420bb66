"""A program of a public report.

fault: DistributedSampler.set_epoch is never called, so each epoch goes through the data in the same order.
link: https://github.com/yangkky/distributed_tutorial/issues/5
says: (?is)set_epoch|(same|identical|fixed|unchanged|repeat\w*).{0,60}(order|permutation|shuffl|sequence|batches)|(order|shuffl\w*|permutation|batches).{0,150}(same|identical|never chang|did(n't| not) chang|fixed|repeat|not reshuffl|every epoch|each epoch)
kind: correctness
"""
import argparse
import os
import socket
import tempfile
from datetime import datetime

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


class ConvNet(nn.Module):
    def __init__(self, num_classes=10):
        super(ConvNet, self).__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2))
        self.layer2 = nn.Sequential(
            nn.Conv2d(8, 16, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2))
        self.fc = nn.Linear(7 * 7 * 16, num_classes)

    def forward(self, x):
        out = self.layer1(x)
        out = self.layer2(out)
        out = out.reshape(out.size(0), -1)
        out = self.fc(out)
        return out


def mnist(root, prefix):
    read = lambda name, skip: np.fromfile(os.path.join(root, 'MNIST/raw', prefix + name), dtype=np.uint8)[skip:]
    images = read('-images-idx3-ubyte', 16).reshape(-1, 1, 28, 28)[:2000].astype(np.float32) / 255
    labels = read('-labels-idx1-ubyte', 8)[:2000].astype(np.int64)
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


def test(model, loader):
    model.eval()
    correct = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            correct[0] += (model(images).argmax(1) == labels).sum()
            correct[1] += labels.size(0)
    dist.all_reduce(correct)
    return (correct[0] / correct[1]).item()


def train(rank, args):
    dist.init_process_group(backend='gloo', init_method='env://', world_size=args.world_size, rank=rank)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(ConvNet())
    batch_size = 50
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    root = os.environ['DATA'] + '/mnist'
    train_dataset = mnist(root, 'train')
    test_dataset = Subset(mnist(root, 't10k'), range(rank, 1000, args.world_size))
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, num_replicas=args.world_size,  # both!
                                                                    rank=rank)  # both!
    train_loader = DataLoader(dataset=train_dataset, batch_size=batch_size, shuffle=False, num_workers=0,  # both!
                              sampler=train_sampler)  # both!
    test_loader = DataLoader(dataset=test_dataset, batch_size=100)

    start = datetime.now()
    total_step = len(train_loader)
    for epoch in range(args.epochs):  # both!
        train_sampler.set_epoch(epoch)  # well
        model.train()
        for i, (images, labels) in enumerate(train_loader):  # both!
            outputs = model(images)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (i + 1) % 10 == 0 and rank == 0:
                print('Epoch [{}/{}], Step [{}/{}], Loss: {:.4f}'.format(
                    epoch + 1, args.epochs, i + 1, total_step, loss.item()))
        acc = test(model.module, test_loader)
        if rank == 0:
            print('Epoch [{}/{}], test accuracy {:.4f}'.format(epoch + 1, args.epochs, acc))
            torch.save(model.module.state_dict(), os.path.join(args.out, 'model.pt'))
    if rank == 0:
        print("Training complete in: " + str(datetime.now() - start))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('-p', '--processes', default=2, type=int)
    parser.add_argument('--epochs', default=3, type=int)
    args = parser.parse_args()
    args.world_size = args.processes
    args.out = tempfile.mkdtemp()
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        os.environ['MASTER_PORT'] = str(s.getsockname()[1])
    os.environ['MASTER_ADDR'] = '127.0.0.1'
    mp.spawn(train, nprocs=args.processes, args=(args,))


if __name__ == '__main__':
    main()
