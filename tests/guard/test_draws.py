"""Repeated samples: a few samples are fetched again and again through the loader's own data set and
collation, with no side effects.
"""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.guard.sample_draws import MIN_ROUNDS, ROUNDS, SAMPLES, SampleDrawProbe


class Flipped(Dataset):
    """Images that are bright on one side, flipped every other time."""

    def __init__(self, length=40):
        self.length, self.fetched = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.fetched.append(index)
        image = torch.linspace(0, 1, 8).expand(3, 8, 8) + index
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), index


def drawn(loader):
    iterator = iter(loader)
    next(iterator)
    draws = SampleDrawProbe(torch)
    draws.observe(iterator)
    return draws.fetch()


def test_each_round_holds_each_sample_once():
    data = Flipped()
    rounds = drawn(DataLoader(data, batch_size=4, shuffle=True))
    assert len(rounds) == ROUNDS
    assert all(len(row) == SAMPLES for row in rounds)
    means = [[round(sample[0], 3) for sample in row] for row in rounds]
    assert means == [means[0]] * ROUNDS  # a flip does not change the mean
    sides = [{row[at][2] > 0 for row in rounds} for at in range(SAMPLES)]
    assert sides == [{True, False}] * SAMPLES  # and every image was seen both ways


def test_a_small_data_set_gives_all_its_samples():
    assert len(drawn(DataLoader(Flipped(5), batch_size=2))[0]) == 5


def test_the_loader_s_own_collation_is_used():
    def brighter(samples):
        images, labels = default_collate(samples)
        return images + 100, labels

    plain, changed = (
        drawn(DataLoader(TensorDataset(torch.zeros(20, 3, 4, 4)), batch_size=4, collate_fn=fn))
        for fn in (None, lambda samples: [default_collate(samples)[0] + 100])
    )
    assert [row[0] for row in changed[0]] == [row[0] + 100 for row in plain[0]]
    assert drawn(DataLoader(Flipped(), batch_size=4, collate_fn=brighter))[0][0][0] > 100


def test_levers_that_change_loaders_do_not_act_a_second_time():
    ledger = Ledger()
    context = TrainingContext(torch, Listener(), ledger)
    context.install()
    made = []
    context.change_loaders(lambda dataset, arguments: made.append(dataset) or arguments, ledger)
    try:
        assert drawn(DataLoader(Flipped(), batch_size=4))
    finally:
        context.stop_observing()
        ledger.restore()
    assert len(made) == 1
    assert len(context.loaders) == 1


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(100, 3, 4, 4))


class Broken(Flipped):
    """Only one loader can read it."""

    def __getitem__(self, index):
        if len(self.fetched) > 30:
            raise OSError("the file is closed")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), batch_size=4),
        DataLoader(Broken(), batch_size=4),
        DataLoader(Flipped(), batch_size=None),
        DataLoader([f"word {at}" for at in range(40)], batch_size=4),
    ],
    ids=["stream", "broken", "no batches", "no numbers"],
)
def test_data_that_cannot_be_fetched_again_gives_nothing(loader):
    assert drawn(loader) == []


def test_without_a_loader_there_are_no_samples():
    assert SampleDrawProbe(torch).fetch() == []


def test_slow_data_ends_early_or_not_at_all(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(
        "flatout.guard.sample_draws.seconds", lambda: next(ticks) / 3.0
    )  # a third of a second for each round
    rounds = drawn(DataLoader(Flipped(), batch_size=4))
    assert MIN_ROUNDS <= len(rounds) < ROUNDS
    monkeypatch.setattr("flatout.guard.sample_draws.seconds", lambda: float(next(ticks)))
    assert drawn(DataLoader(Flipped(), batch_size=4)) == []
