"""A program of a public report.

fault: StepLR(step_size=EPOCHS//2) is stepped after every batch instead of every epoch, so the learning rate is practically zero after a few batches.
link: https://github.com/Lornatang/SRGAN-PyTorch/issues/1
says: (?is)(schedul|StepLR|learning rate|\blr\b|step_size).{0,300}(every|each|per|once (a|per)|inner).{0,15}(batch|iteration|step|update)|(schedul|StepLR|learning rate|\blr\b).{0,300}(vanish|(near(ly)?|almost|practically|effectively|close to|to|is|at|reached) (zero|0\b)|collaps|too (fast|often|early|small|low|quick)|decay|e-\d\d|far (below|smaller|lower)|times (smaller|lower|below)|(negligible|tiny))|(weights?|param\w*|model).{0,200}(stop|no longer|hardly|barely|froz|do not|did not|don't|almost).{0,40}(chang|mov|updat|train).{0,200}(learning rate|\blr\b|schedul)
kind: correctness
"""
"""SRGAN: x2 super resolution with an adversarial loss."""
import os
import tempfile

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

EPOCHS = 6
BATCH_SIZE = 16
LR = 1e-3


class BlobPairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
        c = torch.rand(n, 3, 2, generator=g) * 1.6 - 0.8
        s = torch.rand(n, 3, generator=g) * 0.25 + 0.08
        d = (yy - c[..., 0, None, None]) ** 2 + (xx - c[..., 1, None, None]) ** 2
        self.hr = torch.exp(-d / s[..., None, None] ** 2)
        self.lr = nn.functional.avg_pool2d(self.hr, 2)

    def __len__(self):
        return len(self.hr)

    def __getitem__(self, i):
        return self.lr[i], self.hr[i]


class Generator(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.head = nn.Sequential(nn.Conv2d(3, ch, 5, padding=2), nn.PReLU())
        self.body = nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.PReLU(),
                                  nn.Conv2d(ch, ch, 3, padding=1), nn.BatchNorm2d(ch))
        self.up = nn.Sequential(nn.Conv2d(ch, ch * 4, 3, padding=1), nn.PixelShuffle(2), nn.PReLU())
        self.tail = nn.Conv2d(ch, 3, 5, padding=2)

    def forward(self, x):
        h = self.head(x)
        return torch.sigmoid(self.tail(self.up(h + self.body(h))))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.LeakyReLU(0.2),
                                 nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
                                 nn.Flatten(), nn.Linear(32 * 64, 1))

    def forward(self, x):
        return self.net(x)


torch.manual_seed(0)
train_loader = DataLoader(BlobPairs(480, 1), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
val_loader = DataLoader(BlobPairs(96, 2), batch_size=BATCH_SIZE)
netG, netD = Generator(), Discriminator()
optimizerG = torch.optim.Adam(netG.parameters(), lr=LR)
optimizerD = torch.optim.Adam(netD.parameters(), lr=LR)
schedulerG = StepLR(optimizerG, step_size=EPOCHS // 2, gamma=0.1)  # both!
schedulerD = StepLR(optimizerD, step_size=EPOCHS // 2, gamma=0.1)  # both!
content_criterion = nn.MSELoss()
adversarial_criterion = nn.BCEWithLogitsLoss()
out_dir = tempfile.mkdtemp()
best_psnr = 0.0

for epoch in range(EPOCHS):
    netG.train()
    netD.train()
    sum_d, sum_g = 0.0, 0.0
    for lr, hr in train_loader:
        real_label = torch.ones(lr.size(0), 1)
        fake_label = torch.zeros(lr.size(0), 1)

        optimizerD.zero_grad()
        sr = netG(lr)
        errD = adversarial_criterion(netD(hr), real_label) + adversarial_criterion(netD(sr.detach()), fake_label)
        errD.backward()
        optimizerD.step()
        schedulerD.step()  # ill!

        optimizerG.zero_grad()
        errG = content_criterion(sr, hr) + 1e-3 * adversarial_criterion(netD(sr), real_label)
        errG.backward()
        optimizerG.step()
        schedulerG.step()  # ill!

        sum_d += errD.item()
        sum_g += errG.item()
    schedulerD.step()  # well
    schedulerG.step()  # well

    netG.eval()
    mse, n = 0.0, 0
    with torch.no_grad():
        for lr, hr in val_loader:
            mse += content_criterion(netG(lr), hr).item() * lr.size(0)
            n += lr.size(0)
    psnr = 10 * torch.log10(torch.tensor(n / mse)).item()
    print(f"[{epoch + 1}/{EPOCHS}] Loss_D: {sum_d / len(train_loader):.4f} "
          f"Loss_G: {sum_g / len(train_loader):.5f} PSNR: {psnr:.2f}")
    if psnr > best_psnr:
        best_psnr = psnr
        torch.save(netG.state_dict(), os.path.join(out_dir, "netG_best.pth"))
