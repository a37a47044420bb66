"""Batches made by a thread are the same ones, in the same order, and fail in the same place."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

pytest.importorskip("torchvision")

from feeding import THREAD, Images, augmented, epochs, fixed, run, same_as_plain
from torch.utils.data import DataLoader, TensorDataset


class Told(TensorDataset):
    """Records the thread of each fetch and the number of concurrent fetches."""

    def __init__(self):
        super().__init__(torch.arange(40))
        self.threads, self.inside, self.most = [], 0, 0

    def __getitem__(self, index):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.threads.append(threading.current_thread().name)
        found = super().__getitem__(index)
        time.sleep(0.001)
        self.inside -= 1
        return found


def test_the_first_batch_is_made_here_and_the_others_in_the_thread():
    info = Told()
    run(lambda: epochs(info, 1, batch_size=5), THREAD)
    assert [name.startswith("batches ahead") for name in info.threads] == [False] * 5 + [True] * 35


def test_one_thread_at_a_time_fetches():
    """Two loaders over one data set never read its open file at the same time."""
    info = Told()

    def program():
        loaders = [DataLoader(info, 2) for _ in range(3)]
        return list(zip(*loaders, strict=True))

    run(program, THREAD)
    assert info.most == 1


def test_random_numbers_stay_in_the_programs_own_thread():
    said = same_as_plain(lambda: epochs(Images(augmented())), THREAD)
    assert said == ["fetching a sample draws random numbers, and a second thread would change their order"]


@pytest.mark.parametrize("size", [1, 5, 23, 24, 40])
def test_every_batch_once_and_in_order(size):
    assert same_as_plain(lambda: epochs(Images(fixed()), 3, batch_size=size), THREAD) == []


class Bound(Images):
    """Works only in the thread that created it, as a database does."""

    def __init__(self, transform, place):
        super().__init__(transform)
        self.thread, self.place = threading.get_ident(), place

    def __getitem__(self, index):
        if threading.get_ident() != self.thread:
            raise RuntimeError("another thread")
        if index == self.place:
            raise KeyError(f"sample {index} is broken")
        return super().__getitem__(index)


def taken(dataset):
    taking, found = iter(DataLoader(dataset, 3)), []
    while True:
        try:
            found.append(next(taking))
        except StopIteration:
            return [*found, next(taking, "ended")]
        except KeyError as error:
            found.append(str(error))


@pytest.mark.parametrize("place", [None, 0, 4, 13, 23])
def test_the_program_does_what_the_thread_cannot(place):
    said = same_as_plain(lambda: taken(Bound(fixed(), place)), THREAD)
    assert (
        any("in the thread" in sentence for sentence in said) or place == 0
    )  # where the first batch fails there never is a thread


class Broken(Images):
    def __getitem__(self, index):
        if index in (7, 8, 20):
            raise KeyError(f"sample {index} is broken")
        return super().__getitem__(index)


def test_exceptions_come_in_their_place_and_the_loader_continues():
    same_as_plain(lambda: taken(Broken(fixed())), THREAD)


def test_a_loop_that_is_left_leaves_no_thread_and_no_iterator():
    def program():
        loader = DataLoader(Images(fixed()), 2)
        for _ in range(5):
            iterator = iter(loader)
            next(iterator)
            next(iterator)
        return weakref.ref(iterator)

    iterator, _, _ = run(program, THREAD)
    gc.collect()
    assert iterator() is None


def test_the_model_uses_random_numbers_while_batches_are_made():
    """Dropout in the loop uses the numbers of a program without a thread."""

    def program():
        found = []
        for batch, _ in DataLoader(Images(fixed()), 3):
            found.append(torch.nn.functional.dropout(batch, 0.5))
        return found

    assert same_as_plain(program, THREAD) == []
