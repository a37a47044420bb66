"""Data sets whose own code calls transforms, in the forms found in real programs."""

from __future__ import annotations

import copy
import io
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from feeding import Images, augmented, pil_images
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate
from torchvision import transforms as v1
from torchvision.transforms import v2

FILES = []
for image in pil_images():
    FILES.append(io.BytesIO())
    image.save(FILES[-1], "png")


def base():
    return [v1.RandomCrop(10, padding=2), v1.RandomHorizontalFlip()]


def last():
    return v1.Compose([v1.ToTensor(), v1.Normalize([0.5] * 3, [0.25] * 3)])


def small():
    return v1.Compose([v1.RandomCrop(6), v1.RandomVerticalFlip(), v1.ToTensor()])


class Views:
    """The object that contrastive learning puts around its transform."""

    def __init__(self, transform, count=2):
        self.transform, self.count = transform, count

    def __call__(self, image):
        return [self.transform(image) for _ in range(self.count)]


class Crops:
    """Two large views of one pipeline and three small ones of another."""

    def __init__(self):
        self.large, self.small = augmented(), small()

    def __call__(self, image):
        return {
            "small": tuple(self.small(image) for _ in range(3)),
            "large": [self.large(image), self.large(image)],
        }


class Loop:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class OwnCompose(v1.Compose):
    def __call__(self, image):
        for step in self.transforms:
            image = step(image)
        return image


class Sometimes:
    """Decides by a generator of its choice."""

    def __init__(self, draw, transform, other):
        self.draw, self.transform, self.other = draw, transform, other

    def __call__(self, image):
        return (self.transform if self.draw() < 0.5 else self.other)(image)


class Drawing(Loop):
    """Uses random numbers between two transforms."""

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
            if torch.rand(1) < 0.5 and isinstance(image, Image.Image):
                image = image.transpose(Image.Transpose.ROTATE_180)
        return image


def closure():
    transform, more = augmented(), small()

    def both(image):
        return transform(image), more(image)

    return both


class Fetching(Dataset):
    """Fetches whole batches and calls the script's transform, as Hugging Face's data sets do."""

    def __init__(self, per_batch):
        self.images = pil_images()
        self.format: dict[str, Any] = {"transform": None}
        self.set_transform(per_batch)

    def set_transform(self, transform):
        self.format = {"transform": transform}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {name: value[0] for name, value in self._formatted([index]).items()}

    def __getitems__(self, indices):
        batch = self._formatted(indices)
        return [{name: value[at] for name, value in batch.items()} for at in range(len(indices))]

    def _formatted(self, indices):
        return self.format["transform"](
            {"image": [self.images[index] for index in indices], "label": list(indices)}
        )


def one_view():
    transform = augmented()

    def per_batch(batch):
        batch["pixels"] = [transform(image.convert("RGB")) for image in batch["image"]]
        del batch["image"]
        return batch

    return per_batch


def view_after_view():
    transform = augmented()
    return lambda batch: {
        "a": [transform(image) for image in batch["image"]],
        "b": [transform(image) for image in batch["image"]],
    }


class Sample(Images):
    """The test provides the function of an image and its index."""

    def __init__(self, make, images=None):
        super().__init__(None, images)
        self.make = make

    def __getitem__(self, index):
        return self.make(self.images[index], index)


def with_mask(seed):
    """Takes the same crop of an image and its mask, by seeding twice."""
    transform = v1.Compose([v1.RandomCrop(8), v1.RandomHorizontalFlip(), v1.ToTensor()])

    def both(image, index):
        start = random.getrandbits(30)
        found = []
        for each in (image, image.convert("L").convert("RGB")):
            seed(start, index)
            found.append(transform(each))
        return found

    return both


def seeded(start, index):
    torch.manual_seed(start)


def seeded_late(start, index):
    """Seeds only after the batch that is made both ways."""
    if index > 15:
        torch.manual_seed(start)


STATE = torch.Generator().manual_seed(3).get_state()


def state_set(start, index):
    torch.set_rng_state(STATE)


def forked(image, index, transform=augmented()):  # noqa: B008
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return transform(image), index


def open_samples(_, index, transform=augmented()):  # noqa: B008
    with Image.open(FILES[index]) as image:
        return transform(image), index


BUFFER = np.zeros((11, 13, 3), dtype=np.uint8)


def buffered(image, index, transform=v1.Compose([v1.ToTensor(), v1.RandomCrop(9)])):  # noqa: B008
    BUFFER[:] = np.asarray(image)
    return transform(BUFFER), index


def overwritten(image, index, transform=augmented()):  # noqa: B008
    image = image.copy()
    found = transform(image)
    image.paste((0, 0, 0), (0, 0, 13, 11))
    return found, index


def retried(image, index, transform=augmented()):  # noqa: B008
    found = transform(image)
    while float(found[0, 0, 0]) < 0:
        found = transform(image)
    return found, index


def pool(image, index, transform=v1.Compose([v1.CenterCrop(9), v1.ToTensor()])):  # noqa: B008
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(transform, [image, image])), index


def pair_of_stages(image, index, first=v1.Compose(base()), then=last()):  # noqa: B008
    image = first(image)
    return then(image), then(image), image.size


def on(transform, use):
    """Samples that use the transform's result."""
    return lambda image, index: (use(transform(image)), index)


def used(transform, use):
    return lambda image: use(transform(image))


FOLLOWED = {
    "attribute": lambda: Images(augmented()),
    "two views": lambda: Images(Views(augmented())),
    "crops of two pipelines": lambda: Images(Crops()),
    "closure": lambda: Images(closure()),
    "list of transforms": lambda: Images(Loop([*base(), *last().transforms])),
    "own compose": lambda: Images(OwnCompose([*base(), *last().transforms])),
    "sequential": lambda: Images(
        torch.nn.Sequential(
            *base(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v1.Normalize([0.5] * 3, [0.5] * 3)
        )
    ),
    "two stages": lambda: Sample(pair_of_stages),
    "version 2": lambda: Images(
        Views(
            v2.Compose(
                [v2.ToImage(), v2.RandomCrop(9), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]
            )
        )
    ),
    "a tail": lambda: Images(Views(v1.Compose([*base(), v1.ToTensor(), v1.Lambda(torch.flatten)]))),
    "set_transform": lambda: Fetching(one_view()),
    "view after view": lambda: Fetching(view_after_view()),
    "subset": lambda: Subset(Images(Views(augmented())), range(3, 20)),
    "two parts": lambda: ConcatDataset(
        [
            Images(Views(augmented())),
            Images(Views(v1.Compose([v1.CenterCrop(10), v1.RandomVerticalFlip(), last()]))),
        ]
    ),
    "either": lambda: Images(
        Sometimes(random.random, augmented(), v1.Compose([v1.CenterCrop(10), v1.ToTensor()]))
    ),
    "file": lambda: Sample(open_samples),
    "buffer": lambda: Sample(buffered),
    "overwritten": lambda: Sample(overwritten),
    "shape": lambda: Sample(
        on(
            augmented(),
            lambda x: (
                x,
                x.shape[1],
                x.dim(),
                x.size(0),
                str(x.dtype),
                len(x),
                isinstance(x, torch.Tensor),
                x.numel(),
            ),
        )
    ),
    "mask by seed": lambda: Sample(with_mask(seeded)),
    "mask by seed, later": lambda: Sample(with_mask(seeded_late)),
    "mask by state": lambda: Sample(with_mask(state_set)),
    "fork": lambda: Sample(forked),
}
"""Followed: their images come in batches."""

LEFT = {
    "mean": lambda: Sample(on(augmented(), lambda x: (x, x.mean()))),
    "arithmetic": lambda: Sample(on(augmented(), lambda x: x * 2 + 1)),
    "in place": lambda: Sample(on(augmented(), lambda x: x.mul_(2))),
    "indexed by": lambda: Sample(
        on(v1.Compose([v1.RandomCrop(9), v1.PILToTensor()]), lambda x: torch.arange(256)[x.long()])
    ),
    "numpy": lambda: Sample(on(augmented(), lambda x: x.numpy())),
    "torch.tensor": lambda: Sample(on(augmented(), lambda x: torch.tensor(x))),
    "constructor": lambda: Sample(on(augmented(), torch.Tensor)),
    "copy": lambda: Sample(on(augmented(), copy.deepcopy)),
    "stack of views": lambda: Sample(on(Views(augmented()), torch.stack)),
    "condition": lambda: Sample(on(augmented(), lambda x: x if x.max() > 1 else -x)),
    "iteration": lambda: Sample(on(augmented(), lambda x: [c.sum() for c in x])),
    "assigned": lambda: Sample(
        on(
            augmented(),
            lambda x: torch.zeros(2, *x.shape).index_fill(0, torch.tensor([1]), 1.0).__setitem__(0, x) or x,
        )
    ),
    "script": lambda: Sample(on(augmented(), SCRIPT)),
    "retried": lambda: Sample(retried),
    "functional": lambda: Sample(
        lambda image, index: (v1.functional.to_tensor(v1.functional.hflip(image)), index)
    ),
    "made again": lambda: Sample(lambda image, index: (augmented()(image), index)),
    "draws between": lambda: Images(Drawing([*base(), *last().transforms])),
    "threads": lambda: Sample(pool),
    "unknown": lambda: Images(Views(v1.Compose([v1.ToTensor(), v1.RandomPerspective(0.4, 1.0)]))),
    "pil_image": lambda: Sample(on(v1.Compose(base()), lambda x: np.asarray(x))),
    "picture's pixels": lambda: Sample(on(v1.RandomCrop(9), lambda x: (x.getpixel((0, 0)), x.size, x.mode))),
}
"""Not followed, or not to the end: right, without a gain."""

SCRIPT = torch.jit.script(torch.nn.ReLU())


# -- collation


def by_stack(samples):
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def by_stack_of_tuple(samples):
    images, labels = zip(*samples, strict=True)
    return {"x": torch.stack(images, dim=0).float(), "y": labels}


def by_filling(samples):
    batch = torch.empty(len(samples), *samples[0][0].shape)
    for at, (x, _) in enumerate(samples):
        batch[at] = x
    return batch


def by_cat(samples):
    return torch.cat([x.unsqueeze(0) for x, _ in samples])


def by_numpy(samples):
    return torch.from_numpy(np.stack([x.numpy() for x, _ in samples]))


def as_lists(samples):
    return tuple(zip(*samples, strict=True))


def identity(samples):
    return samples


def mixed(samples):
    """Mixes images with random weights, as training recipes do in their collation."""
    images, labels = default_collate(samples)
    weight = float(torch.rand(1))
    return images.roll(1, 0).mul_(1 - weight).add_(images.mul(weight)), labels


def twice(samples):
    first = torch.stack([x for x, _ in samples])
    first.add_(1)
    return first, torch.stack([x for x, _ in samples]), samples[0][0]


class Transforming:
    """Calls the transform itself."""

    def __init__(self):
        self.transform = augmented()

    def __call__(self, samples):
        return torch.stack([self.transform(image) for image, _ in samples]), [label for _, label in samples]


COLLATED = {
    "stack": by_stack,
    "stack of tuple": by_stack_of_tuple,
    "fill": by_filling,
    "cat": by_cat,
    "numpy": by_numpy,
    "lists": as_lists,
    "as it is": identity,
    "mixed": mixed,
    "twice": twice,
    "default": default_collate,
}


# -- streams


class Stream(IterableDataset):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __iter__(self) -> Any:
        return ((self.transform(image), at) for at, image in enumerate(pil_images()))
