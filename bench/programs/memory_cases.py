"""Training programs of many kinds, for the memory of their steps: ``memory_cases.py CASE [--batch-size N]``.

``--device cuda`` runs it on a GPU. Data are synthetic and models are small enough for a CPU; each has a
DataLoader, whose batch size may be changed from outside. They train until stopped.
"""

import argparse

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Invented(Dataset):
    """Samples computed from their index: ``("float", shape)`` or ``("class", shape, classes)``."""

    def __init__(self, *parts, length=4096):
        self.parts, self.length = parts, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        torch_generator = torch.Generator().manual_seed(index)
        return tuple(
            torch.randn(part[1], generator=torch_generator)
            if part[0] == "float"
            else torch.randint(part[2], part[1], generator=torch_generator)
            for part in self.parts
        )


class Gpt(nn.Module):
    """Pre-norm transformer blocks; ``tokens`` (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, vocabulary=2000, length=64, width=128, heads=4, layers=3):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(layers)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for attention, mlp, first, second in zip(
            self.attention, self.mlp, self.norms[::2], self.norms[1::2], strict=True
        ):
            normed = first(x)
            x = x + attention(normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False)[0]
            x = x + mlp(second(x))
        return self.head(x)


class Lstm(nn.Module):
    def __init__(self, vocabulary=4000, width=192, layers=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2, batch_first=True)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class UNet(nn.Module):
    """Halves and doubles the image twice, with skip connections."""

    def __init__(self, width=24):
        super().__init__()
        self.down = nn.ModuleList([self.block(3, width), self.block(width, 2 * width)])
        self.middle = self.block(2 * width, 4 * width)
        self.rise = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([self.block(4 * width, 2 * width), self.block(2 * width, width)])
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def block(inside, outside):
        layers = []
        for channels in (inside, outside):
            layers += [
                nn.Conv2d(channels, outside, 3, padding=1, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)

    def forward(self, x):
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for rise, block, beside in zip(self.rise, self.up, reversed(kept), strict=True):
            x = block(torch.cat([rise(x), beside], 1))
        return self.out(x)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.mean, self.spread = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.outer = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784), nn.Sigmoid())

    def forward(self, x):
        hidden = F.relu(self.inner(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.outer(mean + torch.exp(0.5 * spread) * torch.randn_like(spread)), mean, spread


class Recommender(nn.Module):
    """Two large tables and a small network over what is looked up in them."""

    def __init__(self, users=60000, items=30000, width=64):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.score = nn.Sequential(nn.Linear(2 * width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, user, item):
        return self.score(torch.cat([self.users(user), self.items(item)], 1)).squeeze(1)


def images(size, classes):
    return Invented(("float", (3, size, size)), ("class", (), classes))


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model, batch):
    logits = model(batch[0][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


def paint(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def rebuild(model, batch):
    x = batch[0].sigmoid()
    again, mean, spread = model(x)
    return F.binary_cross_entropy(again, x, reduction="sum") - 0.5 * torch.sum(
        1 + spread - mean.pow(2) - spread.exp()
    )


def rate(model, batch):
    return F.mse_loss(model(batch[0], batch[1]), batch[2])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def vit():
    return torchvision.models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=4, num_heads=4, hidden_dim=192, mlp_dim=768, num_classes=100
    )


def mlp():
    return nn.Sequential(
        nn.Linear(512, 1024),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


TOKENS = ("class", (65,), 2000)
# case -> model, data set, loss, optimizer, batch size
CASES = {
    "resnet18 sgd": (
        lambda: torchvision.models.resnet18(num_classes=100),
        images(64, 100),
        classify,
        sgd,
        16,
    ),
    "resnet18 adamw": (
        lambda: torchvision.models.resnet18(num_classes=100),
        images(64, 100),
        classify,
        adamw,
        16,
    ),
    "resnet50 sgd": (lambda: torchvision.models.resnet50(num_classes=100), images(64, 100), classify, sgd, 8),
    "resnet50 adamw": (
        lambda: torchvision.models.resnet50(num_classes=100),
        images(64, 100),
        classify,
        adamw,
        8,
    ),
    "vit": (vit, images(64, 100), classify, adamw, 16),
    "gpt": (Gpt, Invented(TOKENS), next_token, adamw, 8),
    "lstm": (Lstm, Invented(("class", (33,), 4000)), next_token, adamw, 8),
    "mlp": (mlp, Invented(("float", (512,)), ("class", (), 10)), classify, adamw, 64),
    "unet": (UNet, Invented(("float", (3, 64, 64)), ("class", (64, 64), 2)), paint, adamw, 4),
    "vae": (Vae, Invented(("float", (784,))), rebuild, adamw, 128),
    "embedding": (
        Recommender,
        Invented(("class", (), 60000), ("class", (), 30000), ("float", ())),
        rate,
        plain_sgd,
        256,
    ),
    "gpt bf16": (Gpt, Invented(TOKENS), next_token, adamw, 8),
    "gpt accumulate": (Gpt, Invented(TOKENS), next_token, adamw, 4),
    "gan": (None, Invented(("float", (3, 32, 32))), None, adamw, 32),
}


def train_gan(loader, device):
    """A generator and a critic, each with an optimizer of its own."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(64, 128, 4),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
        nn.Tanh(),
    ).to(device)
    critic = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 4),
        nn.Flatten(0),
    ).to(device)
    of_critic, of_generator = adamw(critic.parameters()), adamw(generator.parameters())
    while True:
        for (real,) in loader:
            real = real.to(device)
            noise = torch.randn(len(real), 64, 1, 1, device=device)
            of_critic.zero_grad()
            invented = generator(noise)
            said, of_invented = critic(real), critic(invented.detach())
            loss = F.binary_cross_entropy_with_logits(
                said, torch.ones_like(said)
            ) + F.binary_cross_entropy_with_logits(of_invented, torch.zeros_like(said))
            loss.backward()
            of_critic.step()
            of_generator.zero_grad()
            F.binary_cross_entropy_with_logits(critic(invented), torch.ones_like(said)).backward()
            of_generator.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    make, data, loss_of, optimizer_of, size = CASES[args.case]
    loader = DataLoader(data, batch_size=args.batch_size or size, shuffle=True, drop_last=True)
    if args.case == "gan":
        train_gan(loader, args.device)
    model = make().to(args.device)
    optimizer = optimizer_of(model.parameters())
    accumulate = 4 if args.case == "gpt accumulate" else 1
    while True:
        for at, batch in enumerate(loader):
            batch = [part.to(args.device) for part in batch]
            with torch.autocast(args.device, torch.bfloat16, enabled=args.case == "gpt bf16"):
                loss = loss_of(model, batch) / accumulate
            loss.backward()
            if (at + 1) % accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if at % 50 == 0:
                print(f"batch {at}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
