"""Programs that take batches from real DataLoaders, run plainly and with levers of the data path, then
compared.

The levers run in a real training context.
"""

import random

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers import TABLE

LEVER = {lever.name: lever for lever in TABLE}
BATCHED = ("batched_transforms", "all")
LAZILY = ("cached_prefix", {"mib": 64})
AT_ONCE = ("cached_prefix", {"mib": 64, "ahead": True})
FEEDS = [(BATCHED,), (LAZILY,), (BATCHED, AT_ONCE)]
FEED_NAMES = ["batched", "lazily", "batched at once"]


def workers(count):
    return "loader", {"workers": count}


def augmented():
    return v1.Compose(
        [
            v1.RandomCrop(10, padding=2),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )


def fixed():
    return v1.Compose([v1.ToTensor(), v1.Normalize([0.5] * 3, [0.25] * 3)])


def pil_images(count=24, height=11, width=13, mode="RGB"):
    make = np.random.RandomState(3)
    return [
        Image.fromarray(make.randint(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
        for _ in range(count)
    ]


class Images(Dataset):
    """Images in memory, one label each, and the pipeline in an attribute."""

    def __init__(self, transform, images=None):
        self.images = pil_images() if images is None else images
        self.labels = list(range(len(self.images)))
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def epochs(dataset, count=2, meanwhile=None, **arguments):
    """Every batch of some epochs.

    After each one follow the model's own random number and the result of ``meanwhile(dataset, epoch,
    batch)``.
    """
    loader, found = DataLoader(dataset, **{"batch_size": 5, "shuffle": True, **arguments}), []
    for epoch in range(count):
        for at, batch in enumerate(loader):
            found += [batch, torch.rand(1)]
            if meanwhile is not None:
                found.append(meanwhile(dataset, epoch, at))
    return found


def run(program, *levers):
    """The program's results, the final generator states, and the messages of the levers."""
    ledger, context = Ledger(), None
    if levers:
        context = TrainingContext(torch, Listener(), ledger)
        context.install()
        for name, value in levers:
            LEVER[name].apply(context, value, ledger)
    try:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        answer = program()
        end = [
            torch.get_rng_state().tolist(),
            random.getstate(),
            [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()],
        ]
    finally:
        if context is not None:
            context.stop_observing()
        ledger.restore()
    return answer, end, context.reports if context is not None else []


def difference(a, b, way=""):
    """The difference of two results in type, layout or any bit, or nothing.

    It does not use the code that it judges.
    """
    if type(a) is not type(b):
        return f"{way}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, Tensor):
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return (
                f"{way}: {a.dtype} {tuple(a.shape)} {a.stride()} and {b.dtype} {tuple(b.shape)} {b.stride()}"
            )
        return (
            ""
            if a.numpy().tobytes() == b.numpy().tobytes()
            else f"{way}: {int((a != b).sum())} of {a.numel()} values"
        )
    if isinstance(a, dict):
        return (
            f"{way}: keys"
            if list(a) != list(b)
            else next((w for key in a if (w := difference(a[key], b[key], f"{way}[{key!r}]"))), "")
        )
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{way}: {len(a)} and {len(b)} parts"
        return next(
            (w for i, (x, y) in enumerate(zip(a, b, strict=True)) if (w := difference(x, y, f"{way}[{i}]"))),
            "",
        )
    return "" if a == b else f"{way}: {a!r} and {b!r}"


def same_as_plain(program, *levers):
    """Compare a program under levers with the plain one, generators included. Returns the messages."""
    plain, plain_end, _ = run(program)
    fed, end, said = run(program, *levers)
    assert difference(plain, fed) == ""
    assert end == plain_end, "a random generator ends in another state"
    assert all(len(sentence.split()) >= 4 and "\n" not in sentence for _, sentence in said), said
    return [sentence for _, sentence in said]
