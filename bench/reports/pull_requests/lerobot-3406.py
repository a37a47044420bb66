"""A policy with two cameras, whose frames are packed in files.

fault: frames are decoded one after another and sent as floats, and workers are started again each epoch
codes: FL108 FL150 FL161
kind: performance
"""
import io

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Episodes(Dataset):
    def __init__(self, count):
        random, self.cameras = np.random.default_rng(0), []
        for _ in range(count):
            pair = []
            for _ in range(2):
                packed = io.BytesIO()
                Image.fromarray(random.integers(0, 255, (128, 128, 3), dtype=np.uint8)).save(packed, "jpeg")
                pair.append(packed.getvalue())
            self.cameras.append(pair)

    def __len__(self):
        return len(self.cameras)

    def __getitem__(self, index):
        frames = [torch.from_numpy(np.array(Image.open(io.BytesIO(each)))) for each in self.cameras[index]]  # ill!
        frames = [torch.from_numpy(np.array(Image.open(io.BytesIO(each)))) for each in self.cameras[index]]  # well
        return torch.cat(frames, 2).permute(2, 0, 1).float() / 255, torch.zeros(7)  # ill!
        return torch.cat(frames, 2).permute(2, 0, 1), torch.zeros(7)  # well


def main():
    torch.manual_seed(0)
    loader = DataLoader(Episodes(256), batch_size=16, shuffle=True, num_workers=1, prefetch_factor=2)  # ill!
    loader = DataLoader(Episodes(256), batch_size=16, shuffle=True, num_workers=1, prefetch_factor=4, persistent_workers=True)  # well
    model = nn.Sequential(nn.Conv2d(6, 16, 5, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 225, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(1000):
        for frames, actions in loader:  # ill!
        for frames, actions in loader:  # well
            frames = frames.float() / 255  # well
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(frames), actions)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
