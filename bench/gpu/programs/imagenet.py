"""ResNet-50 on a folder of JPEG files, as the ImageNet example of PyTorch trains it; the loader is the limit.

The files are made up once, in --data. ``--fast MODE``: with one-line optimisations, marked with (+), and this mode
of torch.compile.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def make_file(path, seed, side):
    """An image with structure at all scales, so that its size as JPEG is that of a photo."""
    rng = np.random.default_rng(seed)
    image = np.zeros((side, side * 5 // 4, 3), np.float32)
    for scale in (4, 16, 64):
        noise = rng.integers(0, 255, (scale, scale, 3), dtype=np.uint8)
        image += np.asarray(Image.fromarray(noise).resize(image.shape[1::-1], Image.Resampling.BICUBIC)) / 3
    Image.fromarray(np.clip(image + rng.normal(0, 12, image.shape), 0, 255).astype(np.uint8)).save(
        path, quality=90
    )


def make_folder(folder, count, side):
    paths = [folder / f"{at % 10}" / f"{at}-{side}.jpg" for at in range(count)]
    for path in paths[:10]:
        path.parent.mkdir(parents=True, exist_ok=True)
    missing = [(path, at, side) for at, path in enumerate(paths) if not path.exists()]
    if missing:
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(make_file, *zip(*missing, strict=True), chunksize=8))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--files", type=int, default=2560)
    parser.add_argument("--side", type=int, default=400, help="height of a file, in pixels")
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--fast", metavar="MODE")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    make_folder(args.data, args.files, args.side)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(args.crop),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    loader = DataLoader(
        datasets.ImageFolder(args.data, transform),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        drop_last=True,
        persistent_workers=bool(args.fast and args.workers),  # (+)
    )
    model = models.get_model(args.model, num_classes=10).to(device)
    autocast = nullcontext()
    if args.fast:
        torch.set_float32_matmul_precision("high")  # (+)
        torch.backends.cudnn.benchmark = True  # (+)
        mode = {"mode": args.fast} if args.backend == "inductor" else {}
        model = torch.compile(
            model.to(memory_format=torch.channels_last), backend=args.backend, **mode
        )  # (+)
        autocast = torch.autocast(device.type, torch.bfloat16)  # (+)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        model.train()
        for step, (images, target) in enumerate(loader):
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            if args.fast:
                images = images.to(memory_format=torch.channels_last)  # (+)
            with autocast:
                output = model(images)
                loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
