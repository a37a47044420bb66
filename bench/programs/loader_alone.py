"""A loader without a model: a line ``N`` on standard input reads N batches and prints the seconds.

It reads batches that workers have prepared before the clock starts.
"""

import argparse
import sys
import time

import torch
from small_images import SETS, Images
from torch.utils.data import DataLoader, default_collate

BATCH = 128


def plain(data, transform, workers):
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers)
    while True:
        yield from loader


def torchdata(data, transform, workers):
    """The same transforms one by one, in threads of one process."""
    from torchdata import nodes

    def orders():
        while True:
            yield from torch.randperm(len(data)).tolist()

    samples = nodes.ParallelMapper(
        nodes.IterableWrapper(orders()), map_fn=data.__getitem__, num_workers=max(1, workers), method="thread"
    )
    yield from nodes.Loader(nodes.Mapper(nodes.Batcher(samples, BATCH), default_collate))


def spdl(data, transform, workers):
    """The same transforms one by one, in the threads of SPDL's pipeline."""
    from spdl.pipeline import PipelineBuilder

    def orders():
        while True:
            yield from torch.randperm(len(data)).tolist()

    threads = max(1, workers)
    pipeline = (
        PipelineBuilder()
        .add_source(orders())
        .pipe(data.__getitem__, concurrency=threads)
        .aggregate(BATCH, drop_last=True)
        .pipe(default_collate)
        .add_sink(4)
        .build(num_threads=threads)
    )
    with pipeline.auto_stop():
        yield from pipeline


def kornia(data, transform, workers):
    """Gathers bytes in batches, and kornia transforms them. Its random numbers differ."""
    from kornia import augmentation

    images, labels = torch.from_numpy(data.data), torch.tensor(data.targets)
    colours = images.dim() == 4
    normalize = transform.transforms[-1]
    steps = (
        [augmentation.RandomCrop((32, 32), padding=4), augmentation.RandomHorizontalFlip(p=0.5)]
        if colours
        else []
    )
    change = torch.nn.Sequential(
        *steps, augmentation.Normalize(mean=torch.tensor(normalize.mean), std=torch.tensor(normalize.std))
    )
    while True:
        for at in torch.randperm(len(images)).split(BATCH)[:-1]:
            batch = images[at].permute(0, 3, 1, 2) if colours else images[at].unsqueeze(1)
            with torch.no_grad():
                yield [change(batch.float() / 255), labels[at]]


KINDS = {kind.__name__: kind for kind in (plain, torchdata, spdl, kornia)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=SETS, default="cifar")
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--workers", type=int, default=0)
    wanted = parser.parse_args()
    torch.manual_seed(0)
    shape, transform = SETS[wanted.set]
    batches = KINDS[wanted.kind](Images(shape, transform), transform, wanted.workers)
    first = next(batches)
    assert first[0].shape[0] == BATCH
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(4 * wanted.workers + 2):
            next(batches)
        start = time.perf_counter()
        for _ in range(int(line)):
            next(batches)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
