"""A program of a public report.

fault: The random flips are drawn separately for the image and for its mask, so the pair no longer matches.
link: https://github.com/Project-MONAI/MONAI/issues/1102
says: (?is)(image|input|picture).{0,150}(mask|target|label).{0,250}(differ|separate|independent|not the same|own (random|draw)|mismatch|misalign|unalign|out of (step|register|sync)|unsync|no longer match|random|draw)|(random|transform|augment|flip).{0,200}(differ|separate|independent|twice|own draw|not the same|mismatch|misalign|only one).{0,200}(mask|target|label|pair)
kind: correctness
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T


class Lesions(Dataset):
    def __init__(self, n, seed, transform=None):
        g = torch.Generator().manual_seed(seed)
        self.images = 0.3 * torch.randn(n, 1, 32, 32, generator=g)
        self.masks = torch.zeros(n, 1, 32, 32)
        for k in range(n):
            r, c = torch.randint(0, 22, (2,), generator=g).tolist()
            self.masks[k, 0, r:r + 9, c:c + 9] = 1
        self.images += self.masks
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, mask = self.images[i], self.masks[i]
        if self.transform is not None:
            image, mask = self.transform(image), self.transform(mask)  # ill!
            image, mask = self.transform(torch.cat([image, mask])).split(1)  # well
        return image, mask  # both!


def dice(logits, target):
    p = (logits > 0).float()
    return (2 * (p * target).sum() / (p.sum() + target.sum() + 1e-6)).item()


torch.set_num_threads(1)
torch.manual_seed(0)
augment = T.Compose([T.RandomHorizontalFlip(), T.RandomVerticalFlip()])  # both!
train = DataLoader(Lesions(320, 0, augment), batch_size=16, shuffle=True)
val = DataLoader(Lesions(100, 1), batch_size=50)
net = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(),
                    nn.Conv2d(12, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 1, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
loss_fn = nn.BCEWithLogitsLoss()
for epoch in range(6):
    net.train()
    running = 0.0
    for image, mask in train:
        loss = loss_fn(net(image), mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.item()
    net.eval()
    with torch.no_grad():
        score = sum(dice(net(image), mask) for image, mask in val) / len(val)
    print(f"epoch {epoch}: loss {running / len(train):.4f}  val dice {score:.3f}")
