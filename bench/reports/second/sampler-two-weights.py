"""A program of a public report.

fault: WeightedRandomSampler gets two class weights instead of one weight a sample, so only samples 0 and 1 of the dataset are ever drawn.
link: https://github.com/deep-voice/soundbay/pull/49
says: (?is)(sampler|WeightedRandom\w*|sampling weights?).{0,250}(per class|class weight|per sample|each sample|length|len\b|fewer|only|two|2\b|index|indices|short|never|drawn|visited|800)|(only|just).{0,60}(2|two|0 and 1|0, 1|few).{0,60}(sample|item|index|indices|example|row|distinct|different)|(sample|item|row|example|index|indices).{0,150}(never (drawn|used|seen|read|visited|reached)|repeat|again and again|over and over|duplicate)|distinct (sample|item|row|indices)
kind: correctness
"""
"""Detection of whale calls in spectrograms; calls are rare."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class ClassifierDataset(Dataset):
    def __init__(self, n, call_ratio, seed, seq_length=2.0, sample_rate=2000):
        rng = np.random.default_rng(seed)
        t = np.arange(int(seq_length * sample_rate)) / sample_rate
        self.audio, self.labels = [], (rng.uniform(size=n) < call_ratio).astype(np.int64)
        for label in self.labels:
            audio = rng.normal(0, 1.0, t.size) + 0.6 * np.sin(2 * np.pi * rng.uniform(40, 120) * t)
            if label:
                start, f0 = rng.uniform(0.1, 0.9), rng.uniform(250, 450)
                env = np.exp(-((t - start - 0.4) / 0.25) ** 2)
                audio += 1.2 * env * np.sin(2 * np.pi * (f0 + 120 * (t - start)) * t)
            self.audio.append(audio.astype(np.float32))
        self.window = torch.hann_window(128)
        self.samples_weight = self._set_samples_weight()  # both!

    def _set_samples_weight(self):  # both!
        counts = np.bincount(self.labels, minlength=2)  # both!
        class_weight = 1.0 / counts  # both!
        return torch.from_numpy(class_weight / class_weight.sum())  # ill!
        return torch.from_numpy(class_weight[self.labels])  # well

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        audio = torch.from_numpy(self.audio[idx])
        spec = torch.stft(audio, 128, 64, window=self.window, return_complex=True).abs()
        spec = torch.log(spec + 1e-3)
        return ((spec - spec.mean()) / spec.std()).unsqueeze(0), int(self.labels[idx])


class CallDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d((8, 2)), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 2))

    def forward(self, x):
        return self.net(x)


class Trainer:
    def __init__(self, model, train_dataloader, val_dataloader, optimizer, criterion, epochs, output_path):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.train_dataloader, self.val_dataloader = train_dataloader, val_dataloader
        self.epochs, self.output_path = epochs, output_path

    def train(self):
        best = -1.
        for epoch in range(self.epochs):
            self.model.train()
            losses = []
            for audio, label in self.train_dataloader:
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(audio), label)
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
            bacc = self.evaluate(epoch, np.mean(losses))
            if bacc > best:
                best = bacc
                torch.save({'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(),
                            'epoch': epoch}, os.path.join(self.output_path, 'best.pth'))

    def evaluate(self, epoch, train_loss):
        self.model.eval()
        preds, labels = [], []
        with torch.no_grad():
            for audio, label in self.val_dataloader:
                preds.append(self.model(audio).argmax(1))
                labels.append(label)
        preds, labels = torch.cat(preds), torch.cat(labels)
        recall = [(preds[labels == c] == c).float().mean().item() for c in (0, 1)]
        print(f'Epoch {epoch}: train loss {train_loss:.5f}, val accuracy {(preds == labels).float().mean():.4f}, '
              f'call recall {recall[1]:.4f}, background recall {recall[0]:.4f}')
        return sum(recall) / 2


if __name__ == '__main__':
    torch.manual_seed(1312)
    train_dataset = ClassifierDataset(800, 0.12, seed=0)
    val_dataset = ClassifierDataset(300, 0.12, seed=1)
    sampler = WeightedRandomSampler(train_dataset.samples_weight, len(train_dataset))  # both!
    train_dataloader = DataLoader(dataset=train_dataset, sampler=sampler, batch_size=32)  # both!
    val_dataloader = DataLoader(dataset=val_dataset, shuffle=False, batch_size=50)
    model = CallDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    Trainer(model, train_dataloader, val_dataloader, optimizer, nn.CrossEntropyLoss(), epochs=5,
            output_path=tempfile.mkdtemp()).train()
