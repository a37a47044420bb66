"""Samples that one program of a search has kept reach the next one, but never samples of another data set."""

import time
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.data.feed import Feed
from flatout.data.keeping import CacheBudget, CacheOptions
from flatout.data.shared_samples import CHECKED_SAMPLES, SharedSamples
from flatout.data.source import spread
from flatout.data.store import TESTED_SAMPLES

LENGTH = 3000


class Numbers(Dataset):
    """``asked`` lists all fetched indices."""

    def __init__(self, changed=()):
        self.rows = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(0))
        self.rows[list(changed)] += 1.0

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        asked.append(index)
        return self.rows[index].clone(), index % 7


asked = []


def kept(dataset, folder):
    """The store of a program that keeps all samples before its first batch, and the number of samples it
    fetched.
    """
    asked.clear()
    feed = Feed(DataLoader(dataset, batch_size=10))
    feed.cache = CacheOptions(
        CacheBudget(2**24), eager=True, shared_samples=SharedSamples(folder, nullcontext, time.monotonic)
    )
    feed.prepare()
    assert feed.store is not None, feed.refusal or feed.why_no_cache
    assert feed.store.full
    return feed.store, len(asked)


def holds(store, dataset):
    return torch.equal(store.columns[0], dataset.rows) and store.columns[1].tolist() == [
        index % 7 for index in range(LENGTH)
    ]


def test_the_next_program_fetches_only_a_few_samples(tmp_path):
    store, fetch_samples = kept(Numbers(), tmp_path)
    assert fetch_samples >= LENGTH
    again, fetch_samples = kept(Numbers(), tmp_path)
    assert fetch_samples < CHECKED_SAMPLES + 4 * TESTED_SAMPLES
    assert holds(store, Numbers())
    assert holds(again, Numbers())


@pytest.mark.parametrize(
    "at",
    [spread(LENGTH, TESTED_SAMPLES)[3], spread(LENGTH, CHECKED_SAMPLES)[100]],
    ids=["among the proven", "among the checked"],
)
def test_another_data_set_is_fetched_whole(tmp_path, at):
    kept(Numbers(), tmp_path)
    store, fetch_samples = kept(Numbers(changed=[at]), tmp_path)
    assert fetch_samples >= LENGTH
    assert holds(store, Numbers(changed=[at]))


@pytest.mark.parametrize("content", [b"", b"half of a file"])
def test_a_truncated_file_is_ignored(tmp_path, content):
    kept(Numbers(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    store, fetch_samples = kept(Numbers(), tmp_path)
    assert fetch_samples >= LENGTH
    assert holds(store, Numbers())


def test_random_samples_are_not_shared(tmp_path):
    class Noisy(Numbers):
        def __getitem__(self, index):
            return self.rows[index] + torch.rand(3), index

    feed = Feed(DataLoader(Noisy(), batch_size=10))
    feed.cache = CacheOptions(
        CacheBudget(2**24), eager=True, shared_samples=SharedSamples(tmp_path, nullcontext, time.monotonic)
    )
    feed.prepare()
    assert feed.store is None
    assert not list(tmp_path.iterdir())
