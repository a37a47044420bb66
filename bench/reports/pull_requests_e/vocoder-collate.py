"""A program of a public report.

fault: the collater calls torch.tensor on a list of numpy arrays, which converts element by element
link: https://github.com/kan-bayashi/ParallelWaveGAN/issues/367
says: (?i)list of numpy|numpy\.(ndarray|array)|np\.(array|stack)|torch\.tensor|from_numpy|collat|wait.{0,40}(data|loader|batch)|workers?
kind: performance
"""
"""A small vocoder: noise and mel frames to waveforms, trained on random pieces of utterances."""
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

HOP, MELS = 64, 20


class AudioMel(Dataset):
    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.items = []
        for _ in range(count):
            frames = int(rng.integers(120, 200))
            pitch = np.repeat(rng.uniform(0.02, 0.2, frames // 20 + 1), 20 * HOP)[: frames * HOP]
            audio = (0.6 * np.sin(np.cumsum(pitch)) + 0.02 * rng.standard_normal(len(pitch))).astype(np.float32)
            spectrum = np.abs(np.fft.rfft(audio.reshape(frames, HOP), axis=1))[:, :MELS]
            self.items.append((audio, np.log(spectrum + 1e-3).astype(np.float32)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Collater:
    def __init__(self, batch_max_frames=64):
        self.frames = batch_max_frames

    def __call__(self, batch):
        y_batch, c_batch = [], []
        for audio, mel in batch:
            start = np.random.randint(0, len(mel) - self.frames)
            y_batch.append(audio[start * HOP:(start + self.frames) * HOP])
            c_batch.append(mel[start:start + self.frames])
        y_batch = torch.tensor(y_batch, dtype=torch.float).unsqueeze(1)  # ill!
        c_batch = torch.tensor(c_batch, dtype=torch.float).transpose(2, 1)  # ill!
        y_batch = torch.tensor(np.array(y_batch), dtype=torch.float).unsqueeze(1)  # well
        c_batch = torch.tensor(np.array(c_batch), dtype=torch.float).transpose(2, 1)  # well
        return torch.randn(y_batch.size()), c_batch, y_batch


class Generator(nn.Module):
    def __init__(self, channels=12, layers=4):
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.upsample = nn.Upsample(scale_factor=HOP)
        self.condition = nn.Conv1d(MELS, channels, 1)
        self.layers = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 3, padding=2 ** i, dilation=2 ** i) for i in range(layers))
        self.last = nn.Conv1d(channels, 1, 1)

    def forward(self, noise, mel):
        x, c = self.first(noise), self.upsample(self.condition(mel))
        for layer in self.layers:
            a, b = layer(x + c).chunk(2, 1)
            x = x + torch.tanh(a) * torch.sigmoid(b)
        return self.last(x)


def stft_loss(fake, real):
    window = torch.hann_window(256)
    spectra = [torch.stft(x[:, 0], 256, 64, window=window, return_complex=True).abs().clamp(min=1e-4) for x in (fake, real)]
    return (spectra[0] - spectra[1]).norm() / spectra[1].norm() + (spectra[0].log() - spectra[1].log()).abs().mean()


if __name__ == "__main__":
    np.random.seed(0)
    torch.manual_seed(0)
    train = DataLoader(AudioMel(160, 1), batch_size=6, shuffle=True, collate_fn=Collater(), drop_last=True)
    dev = DataLoader(AudioMel(24, 2), batch_size=6, collate_fn=Collater())
    model = Generator()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    for epoch in range(5000):
        begin, total = time.time(), 0.0
        model.train()
        for noise, mel, audio in train:
            loss = stft_loss(model(noise, mel), audio)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10)
            optimizer.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            error = sum(stft_loss(model(noise, mel), audio).item() for noise, mel, audio in dev) / len(dev)
        print(f"epoch {epoch} loss {total / len(train):.4f} dev {error:.4f} {time.time() - begin:.2f}s", flush=True)
