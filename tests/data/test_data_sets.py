"""Data sets of every kind, torch's own and torchvision's: batches are those of the plain loader."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("torchvision")

import torchvision
from feeding import (
    BATCHED,
    FEED_NAMES,
    FEEDS,
    LAZILY,
    Images,
    augmented,
    epochs,
    fixed,
    pil_images,
    same_as_plain,
)
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision import transforms as v1

each_feed = pytest.mark.parametrize("levers", FEEDS, ids=FEED_NAMES)


class Wrapper(Dataset):
    def __init__(self, inner, transform=None):
        self.inner, self.transform = inner, transform

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        image, label = self.inner[index]
        return (self.transform(image) if self.transform else image), label + 1


class Joint(Images):
    """Has a pipeline for targets as well, in the pair that torchvision's data sets keep."""

    def __init__(self, transform, target_transform=None):
        super().__init__(transform)
        self.target_transform = target_transform
        self.transforms = torchvision.datasets.vision.StandardTransform(transform, target_transform)

    def __getitem__(self, index):
        return self.transforms(self.images[index], self.labels[index])


def folder(tmp):
    for at, image in enumerate(pil_images(12)):
        (tmp / f"{at % 3}").mkdir(parents=True, exist_ok=True)
        image.save(tmp / f"{at % 3}" / f"{at}.png")
    return tmp


FOUND = {
    "itself": lambda: Images(augmented()),
    "subset": lambda: Subset(Images(augmented()), range(3, 20)),
    "split": lambda: random_split(Images(augmented()), [20, 4])[0],
    "subset of a subset": lambda: Subset(Subset(Images(augmented()), range(20)), [4, 2, 9, 1]),
    "two": lambda: ConcatDataset(
        [Images(augmented()), Images(v1.Compose([v1.CenterCrop(10), v1.ToTensor()]))]
    ),
    "one twice": lambda: ConcatDataset([Images(augmented())] * 2),
    "part of one": lambda: ConcatDataset([Images(augmented()), Subset(Images(fixed_10()), [1, 2])]),
    "wrapped": lambda: Wrapper(Images(augmented())),
    "wrapped outside": lambda: Wrapper(Images(v1.Lambda(lambda image: image)), augmented()),
    "both": lambda: Wrapper(Images(v1.Compose([v1.Pad(2)])), augmented()),
    "joint": lambda: Joint(augmented()),
    "targets": lambda: Joint(augmented(), lambda label: label * 3),
    "targets draw": lambda: Joint(augmented(), lambda label: label + torch.rand(1).item()),
    "single transform": lambda: Images(v1.ToTensor()),
}


def fixed_10():
    return v1.Compose([v1.CenterCrop(10), v1.ToTensor()])


@each_feed
@pytest.mark.parametrize("name", FOUND)
def test_data_sets_of_many_kinds(name, levers):
    said = same_as_plain(lambda: epochs(FOUND[name]()), *levers)
    if levers == (BATCHED,):
        assert said == (
            ["Lambda is not a transform that can run on batches"] if name == "wrapped outside" else []
        )


def test_images_of_a_folder_are_kept_whatever_their_metadata(tmp_path):
    """JPEG files add a density and a version to the pixels."""
    for at, image in enumerate(pil_images(12)):
        (tmp_path / f"{at % 3}").mkdir(exist_ok=True)
        image.save(tmp_path / f"{at % 3}" / f"{at}.jpg", dpi=(72, 72))
    assert Image.open(tmp_path / "0" / "0.jpg").convert("RGB").info
    for levers in [(LAZILY,), (BATCHED, LAZILY)]:
        assert (
            same_as_plain(
                lambda: epochs(torchvision.datasets.ImageFolder(str(tmp_path), augmented())), *levers
            )
            == []
        )


@each_feed
def test_torchvisions_own_data_sets(levers, tmp_path):
    path = folder(tmp_path / "images")
    assert (
        same_as_plain(
            lambda: epochs(torchvision.datasets.ImageFolder(str(path), augmented(), lambda label: label + 1)),
            *levers,
        )
        == []
    )
    same_as_plain(lambda: epochs(torchvision.datasets.FakeData(20, (3, 12, 12), 4, augmented())), *levers)


class Slots(Dataset):
    __slots__ = ("images", "transform")

    def __init__(self):
        self.images, self.transform = pil_images(), fixed()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.transform(self.images[index]), index


class Two(Images):
    def __init__(self):
        super().__init__(augmented())
        self.second = fixed()


class Own(Images):
    """Inspects the result of its transform."""

    def __init__(self):
        super().__init__(augmented())

    def __getitem__(self, index):
        image = self.transform(self.images[index])
        return image * 2 + image.mean(), index


class Deep(Dataset):
    def __new__(cls, depth=12):
        found = Images(augmented())
        for _ in range(depth):
            found = Wrapper(found)
        return found


@dataclass
class Data(Dataset):
    transform: object

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.transform(pil_images()[index]), index


@each_feed
@pytest.mark.parametrize(
    "make",
    [
        Slots,
        Two,
        Own,
        Deep,
        lambda: TensorDataset(torch.arange(24)),
        lambda: [(torch.ones(2), 1)] * 24,
        lambda: Data(augmented()),
    ],
    ids=["slots", "two pipelines", "goes on itself", "deep", "tensors", "list", "dataclass"],
)
def test_data_sets_that_are_hard_to_inspect(make, levers):
    same_as_plain(lambda: epochs(make()), *levers)
