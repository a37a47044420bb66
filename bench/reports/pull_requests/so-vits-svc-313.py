"""A voice model whose samples are read from files.

fault: the loader has no workers, so each step waits for its batch
codes: FL150 FL161
kind: performance
"""
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Voices(Dataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        wave = torch.load(self.files[index], weights_only=True)  # ill!
        wave = torch.load(self.files[index], weights_only=True)  # well
        spectrum = torch.stft(wave, 512, 128, window=torch.hann_window(512), return_complex=True).abs()  # ill!
        spectrum = torch.stft(wave, 512, 128, window=torch.hann_window(512), return_complex=True).abs()  # well
        return spectrum[:, :64], wave[:8192]


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as home:
        files = [Path(home) / f"{number}.pt" for number in range(256)]
        for file in files:
            torch.save(torch.randn(44_100), file)
        loader = DataLoader(Voices(files), batch_size=16, shuffle=True)  # ill!
        loader = DataLoader(Voices(files), batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)  # well
        model = nn.Sequential(nn.Conv1d(257, 64, 3, padding=1), nn.ReLU(), nn.Conv1d(64, 128, 3, padding=1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for epoch in range(1000):
            for spectra, waves in loader:  # ill!
            for spectra, waves in loader:  # well
                optimizer.zero_grad()
                loss = (model(spectra).transpose(1, 2).flatten(1) - waves).abs().mean()
                loss.backward()
                optimizer.step()
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
