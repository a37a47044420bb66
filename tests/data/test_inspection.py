"""A copy of a data set for inspection: the original is unaffected."""

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

pytest.importorskip("torchvision")

from feeding import Images, augmented
from shapes import Views

from flatout.data.inspection import inspection_copy


def test_a_copy_for_inspection():
    dataset = Images(augmented())
    dataset.seen, dataset.cache, dataset.set = [], {}, set()
    whole = ConcatDataset([Subset(dataset, [1]), dataset])
    copy = inspection_copy(whole)
    inner = copy.datasets[1]
    for held in (inner.seen,):
        held.append(1)
    inner.cache["a"], inner.labels[0], inner.more = 1, 99, 5
    inner.set.add(3)
    assert (dataset.seen, dataset.cache, dataset.set, dataset.labels[0], hasattr(dataset, "more")) == (
        [],
        {},
        set(),
        0,
        False,
    )
    assert inner.images[0] is dataset.images[0]
    assert type(copy) is ConcatDataset
    assert len(copy) == len(whole)
    assert inspection_copy([1, 2]) == [1, 2]


class Counting(Views):
    calls = 0

    def __call__(self, image):
        self.calls += 1
        return super().__call__(image)


class Slots(Dataset):
    __slots__ = ("image", "missing")


def test_counters_of_an_object_around_a_transform():
    dataset = Images(Counting(augmented()))
    copy = inspection_copy(Subset(dataset, [1, 2])).dataset
    copy[1]
    assert (copy.transform.calls, dataset.transform.calls) == (1, 0)
    assert copy.transform.transform is dataset.transform.transform


def test_slots_are_copied_as_well():
    dataset = Slots()
    dataset.image, dataset.label = 3, 4
    copy = inspection_copy(dataset)
    copy.image = 5
    assert (copy.image, copy.label, dataset.image, hasattr(copy, "missing")) == (5, 4, 3, False)
