"""A tiny speech recogniser with very short epochs.

fault: the workers are started again for each epoch and each validation
codes: FL108
kind: performance
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Cuts(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        return torch.randn(200, 23, generator=random), torch.randint(1, 4, (8,), generator=random)


def passes(model, loader, optimizer=None):
    for features, texts in loader:
        with torch.set_grad_enabled(optimizer is not None):
            found = model(features.transpose(1, 2)).permute(2, 0, 1).log_softmax(2)
            loss = nn.functional.ctc_loss(found, texts, torch.full((len(texts),), len(found)), torch.full((len(texts),), 8))
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    train = DataLoader(Cuts(48), batch_size=8, shuffle=True, num_workers=2, persistent_workers=False)  # ill!
    train = DataLoader(Cuts(48), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)  # well
    valid = DataLoader(Cuts(16), batch_size=8, num_workers=2)  # ill!
    valid = DataLoader(Cuts(16), batch_size=8, num_workers=2, persistent_workers=True)  # well
    model = nn.Sequential(nn.Conv1d(23, 32, 3), nn.ReLU(), nn.Conv1d(32, 32, 5, stride=3), nn.ReLU(), nn.Conv1d(32, 4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1000):
        model.train()
        loss = passes(model, train, optimizer)
        model.eval()
        print(epoch, loss, passes(model, valid))


if __name__ == "__main__":
    main()
