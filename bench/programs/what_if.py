"""Small programs with one expensive part each; --without really removes that part. Independent of flatout.

python what_if.py CASE [--without]
"""

import gc
import logging
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

WIDTH = 128


class Samples(Dataset):
    """``make`` makes one sample's input from its index."""

    def __init__(self, make, length=4096):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index), index % 10


class Stream(IterableDataset):
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        for index in range(1_000_000_000):
            yield self.make(index), index % 10


def ready(index):
    return torch.full((WIDTH,), float(index % 7))


def sleeping(index):
    time.sleep(0.0005)
    return ready(index)


def computing(index):
    words = sorted(str(number * index) for number in range(120))
    return ready(len(words))


def decoding(index):
    image = torch.arange(96 * 96, dtype=torch.float32).reshape(1, 1, 96, 96)
    small = nn.functional.interpolate(image, size=(8, 16), mode="bicubic", antialias=True)
    return small.flatten()


def batches_from(loader, without):
    """Endless. Without the loader, its first batches from a list."""
    if without:
        kept = [batch for batch, _ in zip(loader, range(4), strict=False)]
        while True:
            yield from kept
    while True:
        yield from loader


def loader(make, workers=0, batch_size=16):
    return DataLoader(Samples(make), batch_size=batch_size, shuffle=True, num_workers=workers)


def narrow(layers=4):
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)], nn.Linear(WIDTH, 10)
    )


class Embedded(nn.Module):
    """A large table of which a step reads a few rows, and the optimizer updates all."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20_000, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.table(x.long().clamp(0, 19_999)).mean(1))


def train(batches, model, optimizer, after=lambda loss: None):
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        after(loss)


def slow_loader(make, workers=0, layers=4, batch_size=16):
    def case(without):
        model = narrow(layers)
        train(
            batches_from(loader(make, workers, batch_size), without),
            model,
            torch.optim.SGD(model.parameters(), 1e-3),
        )

    return case


def stream(without):
    model = narrow()
    train(
        batches_from(DataLoader(Stream(computing), batch_size=16), without),
        model,
        torch.optim.SGD(model.parameters(), 1e-3),
    )


def heavy_optimizer(make_model, make_optimizer):
    def case(without):
        model = make_model()
        train(
            batches_from(loader(ready), True), model, None if without else make_optimizer(model.parameters())
        )

    return case


def printing(without):
    def tell(loss):
        for layer in () if without else range(150):
            print(
                f"layer {layer}: the loss is what it was before, and the weights have moved a little further",
                flush=True,
            )

    model = narrow(2)
    train(batches_from(loader(ready), True), model, torch.optim.SGD(model.parameters(), 1e-3), tell)


def logged(without):
    logger = logging.getLogger("training")
    logger.addHandler(logging.FileHandler(os.devnull))
    logger.setLevel(logging.INFO)

    def tell(loss):
        for layer in () if without else range(60):
            logger.info(
                "layer %d: the loss is what it was before, and the weights have moved by %f", layer, 0.001
            )

    model = narrow(2)
    train(batches_from(loader(ready), True), model, torch.optim.SGD(model.parameters(), 1e-3), tell)


def bar(without):
    def tell(loss):
        for layer in () if without else range(100):
            sys.stderr.write(f"\rlayer {layer}: {'#' * 60}")
            sys.stderr.flush()

    model = narrow(2)
    train(batches_from(loader(ready), True), model, torch.optim.SGD(model.parameters(), 1e-3), tell)


def collecting(without):
    """Keeps many objects alive and creates many in each step, so the collector visits them all repeatedly."""
    alive = [{"number": number, "list": [number]} for number in range(300_000)]
    if without:
        gc.disable()
    notes = []

    def note(loss):
        notes.append([{"at": number} for number in range(3000)])
        if len(notes) > 20:
            notes.clear()

    model = narrow(2)
    train(batches_from(loader(ready), True), model, torch.optim.SGD(model.parameters(), 1e-3), note)
    print(len(alive))


def threads(before, after, width, layers):
    def case(without):
        torch.set_num_threads(after if without else before)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)])
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        x = torch.randn(256, width)
        while True:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return case


CASES = {
    "sleeping loader": slow_loader(sleeping),
    "computing loader": slow_loader(computing),
    "decoding loader": slow_loader(decoding),
    "computing loader beside a larger model": slow_loader(computing, layers=24),
    "loader with a worker": slow_loader(sleeping, workers=1),
    "loader with a worker, most of it hidden": slow_loader(sleeping, workers=1, layers=24),
    "loader with two workers": slow_loader(sleeping, workers=2, layers=12),
    "collation of many small samples": slow_loader(ready, batch_size=256),
    "stream of samples": stream,
    "Adam, one loop over 60 layers": heavy_optimizer(
        lambda: narrow(60), lambda p: torch.optim.Adam(p, foreach=False)
    ),
    "NAdam, one loop over 40 layers": heavy_optimizer(
        lambda: narrow(40), lambda p: torch.optim.NAdam(p, foreach=False)
    ),
    "RMSprop over a large table": heavy_optimizer(Embedded, lambda p: torch.optim.RMSprop(p, momentum=0.9)),
    "Adagrad over a large table": heavy_optimizer(Embedded, lambda p: torch.optim.Adagrad(p)),
    "AdamW over a large table": heavy_optimizer(Embedded, lambda p: torch.optim.AdamW(p)),
    "printing": printing,
    "logging": logged,
    "progress bar": bar,
    "garbage collection": collecting,
    "one thread more": threads(1, 2, 1024, 3),
    "one thread fewer": threads(2, 1, 24, 24),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]("--without" in sys.argv[2:])
