"""Saving and restoring generators, finding those of a data set, and the streams that loader workers would
have had.
"""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from flatout.data.streams import (
    WorkerStreams,
    can_emulate,
    custom_sampler,
    own_generators,
    restore_states,
    same_states,
    seeds_itself,
    states,
)

OURS = np.random.default_rng(5)


class Holder:
    shared = random.Random(4)

    def __init__(self, generator, deep):
        self.transform = [{"a": (generator,)}] if deep else generator

    def draw(self):
        return OURS.normal()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator(),
        lambda: np.random.default_rng(0),
        lambda: np.random.RandomState(0),
        lambda: random.Random(0),
    ],
    ids=["torch", "numpy", "old", "python"],
)
def test_the_generators_of_a_data_set(make, deep):
    mine = make()
    found = own_generators(Holder(mine, deep))
    assert any(each is mine for each in found)
    assert any(each is OURS for each in found)
    assert any(each is Holder.shared for each in found)
    kept = states(found)
    for each in found:
        torch.rand(1, generator=each) if isinstance(each, torch.Generator) else each.random() if hasattr(
            each, "random"
        ) else each.rand()
    assert not same_states(kept, states(found))
    restore_states(kept)
    assert same_states(kept, states(found))


def test_a_closure_and_a_lambda():
    mine = np.random.default_rng(1)
    holder = Holder(None, False)
    holder.transform = lambda image: image + mine.normal()
    assert any(each is mine for each in own_generators(holder))


def test_data_is_not_searched():
    holder = Holder(None, False)
    holder.data = [random.Random(at) for at in range(5000)]
    assert len(own_generators(holder)) < 100


class Drawing(torch.utils.data.Dataset):
    def __len__(self):
        return 18

    def __getitem__(self, index):
        return index, torch.rand(1).item(), random.random(), np.random.rand()


@pytest.mark.processes
@pytest.mark.parametrize("workers", [2, 3])
def test_a_process_uses_the_random_numbers_of_workers(workers):
    """Compared with real workers."""
    torch.manual_seed(2)
    real = [[v.tolist() for v in batch] for batch in DataLoader(Drawing(), 3, num_workers=workers)]
    torch.manual_seed(2)
    base = torch.empty((), dtype=torch.int64).random_().item()
    before = states()
    streams, dataset, found = WorkerStreams(workers, base, Drawing()), Drawing(), []
    for start in range(0, 18, 3):
        with streams.batch():
            samples = [dataset[index] for index in range(start, start + 3)]
        found.append([list(column) for column in zip(*samples, strict=True)])
    assert found == real
    assert same_states(before, states())


def test_streams_leave_the_seeds_of_every_device_alone():
    """torch.manual_seed would seed GPUs as well, and dropout there would repeat in every epoch."""
    seeded = []
    really = torch.cuda.manual_seed_all
    try:
        torch.cuda.manual_seed_all = seeded.append
        torch.manual_seed(1)
        assert seeded == [1]
        WorkerStreams(3, 2**40, Drawing())
        assert seeded == [1]
    finally:
        torch.cuda.manual_seed_all = really


@pytest.mark.parametrize(
    ("workers", "asked", "can"),
    [(0, 3, True), (1, 3, True), (2, 3, False), (2, 4, True), (3, 3, False), (4, 2, False)],
)
def test_loaders_whose_workers_can_be_replaced(workers, asked, can):
    assert can_emulate(workers, asked) is can


class Mine(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(3))


class Child(RandomSampler):
    pass


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("sampler", "own"),
    [
        (None, False),
        ([1, 2], False),
        (range(4), False),
        (SequentialSampler(range(4)), False),
        (RandomSampler(range(4)), False),
        (Mine(), True),
        (Child(range(4)), True),
        (iter([1]), True),
        (RandomSampler(range(4), generator=GENERATOR), False),
        (RandomSampler(range(4), replacement=True), False),
        (RandomSampler(range(4), replacement=True, generator=GENERATOR), True),
        (RandomSampler(range(4), num_samples=9, generator=GENERATOR), True),
        (WeightedRandomSampler([1.0], 4, generator=GENERATOR), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whose_sampler_order_it_is(sampler, own):
    assert bool(custom_sampler(sampler, None)) is own
    assert bool(custom_sampler(None, sampler)) is own
    if isinstance(sampler, torch.utils.data.Sampler):
        assert bool(custom_sampler(None, BatchSampler(sampler, 2, False))) is own


def test_loaders_that_seed_their_workers_themselves():
    assert not seeds_itself(DataLoader(Drawing(), num_workers=1))
    assert seeds_itself(DataLoader(Drawing(), num_workers=1, worker_init_fn=print))
    assert seeds_itself(DataLoader(Drawing(), num_workers=1, persistent_workers=True))
