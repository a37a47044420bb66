"""Where the pipelines of a data set are, and the twin that stops before a step of them: the original never notices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")

import torchvision
from feeding import BATCHED, FEED_NAMES, FEEDS, Pictures, augmented, epochs, fixed, pictures, same_as_plain
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision import transforms as v1

from flatout.pipeline.chain import Changed, Leaf, Stop, Twin, aside, places
from flatout.pipeline.operation import Unknown

each_feed = pytest.mark.parametrize("levers", FEEDS, ids=FEED_NAMES)


class Wrapper(Dataset):
    def __init__(self, inner, transform=None):
        self.inner, self.transform = inner, transform

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        image, label = self.inner[index]
        return (self.transform(image) if self.transform else image), label + 1


class Joint(Pictures):
    """Has a pipeline for targets as well, in the pair that torchvision's data sets keep."""

    def __init__(self, transform, target_transform=None):
        super().__init__(transform)
        self.target_transform = target_transform
        self.transforms = torchvision.datasets.vision.StandardTransform(transform, target_transform)

    def __getitem__(self, index):
        return self.transforms(self.images[index], self.labels[index])


def folder(tmp: Path):
    for at, image in enumerate(pictures(12)):
        (tmp / f"{at % 3}").mkdir(parents=True, exist_ok=True)
        image.save(tmp / f"{at % 3}" / f"{at}.png")
    return tmp


FOUND = {
    "itself": lambda: (Pictures(augmented()), 1), "subset": lambda: (Subset(Pictures(augmented()), range(3, 20)), 1),
    "split": lambda: (random_split(Pictures(augmented()), [20, 4])[0], 1),
    "subset of a subset": lambda: (Subset(Subset(Pictures(augmented()), range(20)), [4, 2, 9, 1]), 1),
    "two": lambda: (ConcatDataset([Pictures(augmented()), Pictures(v1.Compose([v1.CenterCrop(10), v1.ToTensor()]))]), 2),
    "one twice": lambda: (ConcatDataset([Pictures(augmented())] * 2), 2),
    "part of one": lambda: (ConcatDataset([Pictures(augmented()), Subset(Pictures(fixed_10()), [1, 2])]), 2),
    "wrapped": lambda: (Wrapper(Pictures(augmented())), 1), "wrapped outside": lambda: (Wrapper(Pictures(v1.Lambda(lambda image: image)), augmented()), 1),
    "both": lambda: (Wrapper(Pictures(v1.Compose([v1.Pad(2)])), augmented()), 1), "joint": lambda: (Joint(augmented()), 1),
    "targets": lambda: (Joint(augmented(), lambda label: label * 3), 1),
    "targets draw": lambda: (Joint(augmented(), lambda label: label + torch.rand(1).item()), 1),
    "single transform": lambda: (Pictures(v1.ToTensor()), 1),
    "sequence": lambda: (Pictures(torch.nn.Sequential(v1.RandomCrop(9), v1.Grayscale(), v1.RandomHorizontalFlip())), 1),
}


def fixed_10():
    return v1.Compose([v1.CenterCrop(10), v1.ToTensor()])


@each_feed
@pytest.mark.parametrize("name", FOUND)
def test_data_sets_of_many_kinds(name, levers):
    dataset, count = FOUND[name]()
    assert len(places(dataset)) == count
    if name == "sequence":  # images come out, which nobody collates
        return
    same_as_plain(lambda: epochs(FOUND[name]()[0]), *levers)


def test_they_are_really_fed():
    for name in FOUND.keys() - {"sequence"}:
        assert same_as_plain(lambda: epochs(FOUND[name]()[0]), BATCHED) == [], name  # noqa: B023


@each_feed
def test_torchvisions_own_data_sets(levers, tmp_path):
    path = folder(tmp_path / "images")
    assert same_as_plain(lambda: epochs(torchvision.datasets.ImageFolder(str(path), augmented(), lambda label: label + 1)), *levers) == []
    same_as_plain(lambda: epochs(torchvision.datasets.FakeData(20, (3, 12, 12), 4, augmented())), *levers)


class Slots(Dataset):
    __slots__ = ("images", "transform")

    def __init__(self):
        self.images, self.transform = pictures(), fixed()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.transform(self.images[index]), index


class Two(Pictures):
    def __init__(self):
        super().__init__(augmented())
        self.second = fixed()


class Own(Pictures):
    """Calls its transform with more than the image."""

    def __init__(self):
        super().__init__(augmented())

    def __getitem__(self, index):
        image = self.transform(self.images[index])
        return image * 2 + image.mean(), index


class Deep(Dataset):
    def __new__(cls, depth=12):
        found = Pictures(augmented())
        for _ in range(depth):
            found = Wrapper(found)
        return found


@dataclass
class Data(Dataset):
    transform: object

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.transform(pictures()[index]), index


@each_feed
@pytest.mark.parametrize("make", [Slots, Two, Own, Deep, lambda: TensorDataset(torch.arange(24)), lambda: [(torch.ones(2), 1)] * 24, lambda: Data(augmented())],
                         ids=["slots", "two pipelines", "goes on itself", "deep", "tensors", "list", "dataclass"])
def test_what_holds_no_pipeline_is_fed_plainly(make, levers):
    same_as_plain(lambda: epochs(make()), *levers)


@pytest.mark.parametrize(("make", "says"), [(Slots, "holds no pipeline that could be found"), (Two, "several pipelines"), (Deep, "holds no pipeline"),
                                           (lambda: TensorDataset(torch.arange(24)), "holds no pipeline of torchvision's transforms"),
                                           (lambda: [1, 2], "holds no pipeline")])
def test_why_no_pipeline_is_found(make, says):
    with pytest.raises(Unknown, match=says):
        places(make())


# -- the twin ------------------------------------------------------------------------------------------------------------


def twin_of(dataset):
    return Twin(dataset, [Stop(at, (), None) for at in range(len(places(dataset)))])


def test_a_twin_stops_and_the_original_does_not():
    dataset = Joint(augmented(), lambda label: label + 100)
    before = dict(vars(dataset)), dataset.transforms.transform
    twin = twin_of(dataset)
    leaf, label = twin.dataset[3]
    assert isinstance(leaf, Leaf)
    assert leaf.image is dataset.images[3]
    assert label == 103
    assert (dict(vars(dataset)), dataset.transforms.transform) == before
    assert isinstance(dataset[3][0], torch.Tensor)
    assert type(twin.dataset) is Joint


def test_changes_are_carried_to_both_sides():
    dataset = Pictures(augmented())
    inner = Subset(dataset, [5, 6])
    twin = twin_of(inner)
    copy = twin.dataset.dataset
    assert twin.carry_over() is False
    dataset.labels, dataset.new = [7] * 24, 1
    copy.opened = "file"
    assert twin.carry_over() is True
    assert (copy.labels[0], copy.new, dataset.opened) == (7, 1, "file")
    assert twin.carry_over() is False
    del dataset.new
    assert twin.carry_over() is True
    assert not hasattr(copy, "new")
    assert twin.carry_over() is False


@pytest.mark.parametrize("change", [lambda d: setattr(d.dataset, "transform", fixed()), lambda d: setattr(d, "dataset", Pictures(fixed())),
                                    lambda d: delattr(d.dataset, "transform")], ids=["pipeline", "data set", "no pipeline"])
def test_another_way_to_the_pipeline_is_noticed(change):
    dataset = Subset(Pictures(augmented()), [5, 6])
    twin = twin_of(dataset)
    change(dataset)
    with pytest.raises(Changed, match="another pipeline"):
        twin.carry_over()


def test_a_copy_to_look_at():
    dataset = Pictures(augmented())
    dataset.seen, dataset.cache, dataset.set = [], {}, set()
    whole = ConcatDataset([Subset(dataset, [1]), dataset])
    copy = aside(whole)
    inner = copy.datasets[1]
    for held in (inner.seen, ):
        held.append(1)
    inner.cache["a"], inner.labels[0], inner.more = 1, 99, 5
    inner.set.add(3)
    assert (dataset.seen, dataset.cache, dataset.set, dataset.labels[0], hasattr(dataset, "more")) == ([], {}, set(), 0, False)
    assert inner.images[0] is dataset.images[0]
    assert type(copy) is ConcatDataset
    assert len(copy) == len(whole)
    assert aside([1, 2]) == [1, 2]


def test_a_leaf_can_only_be_handed_on():
    leaf = Leaf(1, 0)
    for use in (lambda: leaf * 2, lambda: leaf.shape, lambda: leaf[0], lambda: len(leaf), lambda: leaf.mean(), lambda: list(leaf), lambda: float(leaf)):
        with pytest.raises((TypeError, AttributeError)):
            use()
