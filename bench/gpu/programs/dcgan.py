"""DCGAN at 64x64 as the examples of PyTorch train it: two networks, two optimizers, values read in each step.

``--fast MODE``: with one-line optimisations, marked with (+), and this mode of torch.compile. Images are made up.
"""

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def weights_init(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def generator(width):
    layers = [
        nn.ConvTranspose2d(100, width * 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(width * 8),
        nn.ReLU(True),
    ]
    for a, b in ((8, 4), (4, 2), (2, 1)):
        layers += [
            nn.ConvTranspose2d(width * a, width * b, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * b),
            nn.ReLU(True),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(width):
    layers = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    for a, b in ((1, 2), (2, 4), (4, 8)):
        layers += [
            nn.Conv2d(width * a, width * b, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * b),
            nn.LeakyReLU(0.2, True),
        ]
    return nn.Sequential(*layers, nn.Conv2d(width * 8, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--fast", metavar="MODE")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = TensorDataset(torch.rand(args.images, 3, 64, 64) * 2 - 1)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    net_g, net_d = generator(args.width).to(device), discriminator(args.width).to(device)
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    fused = {"fused": True} if args.fast else {}  # (+)
    adam_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999), **fused)
    adam_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999), **fused)
    autocast = nullcontext()
    if args.fast:
        torch.set_float32_matmul_precision("high")  # (+)
        torch.backends.cudnn.benchmark = True  # (+)
        mode = {"mode": args.fast} if args.backend == "inductor" else {}
        net_g, net_d = (
            torch.compile(net.to(memory_format=torch.channels_last), backend=args.backend, **mode)
            for net in (net_g, net_d)
        )  # (+)
        autocast = torch.autocast(device.type, torch.bfloat16)  # (+)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        for step, (real,) in enumerate(loader):
            real = real.to(device)
            ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
            net_d.zero_grad()
            with autocast:
                loss_real = criterion(net_d(real), ones)
            loss_real.backward()
            with autocast:
                fake = net_g(torch.randn(len(real), 100, 1, 1, device=device))
                loss_fake = criterion(net_d(fake.detach()), zeros)
            loss_fake.backward()
            adam_d.step()
            net_g.zero_grad()
            with autocast:
                loss_g = criterion(net_d(fake), ones)
            loss_g.backward()
            adam_g.step()
            values = loss_real.item() + loss_fake.item(), loss_g.item()
            if step % 50 == 0:
                print(f"epoch {epoch} step {step}: {values[0]:.4f} {values[1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
