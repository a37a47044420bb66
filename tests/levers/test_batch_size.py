"""The lever batch_size: which loader gets the size, and what stays unchanged."""

import pytest
import torch
from known_bad_levers import KNOWN_BAD
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers.batch_size import BATCHES_ITSELF, LEVER, OWN_BATCHES, OWN_SAMPLER
from flatout.schema.facts import Facts
from flatout.schema.lever import Options, Skip

TRAIN, TEST = list(torch.arange(40.0)), list(torch.arange(30.0))


class Own(Sampler):
    """Yields the samples in groups of four, as a sampler does that knows the batch size is four."""

    def __iter__(self):
        return iter(range(40))

    def __len__(self):
        return 40


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(40.0))


class Phases(Listener):
    wants_phases = True


@pytest.fixture
def context():
    ledger = Ledger()
    made = TrainingContext(torch, Phases(), ledger)
    made.install()
    yield made
    made.stop_observing()
    ledger.restore()


def sizes(loader):
    return [len(batch) for batch in loader]


def test_one_loader_gets_it_and_the_others_stay(context):
    """The second of three loaders; made again for another epoch it is the same one."""
    LEVER.apply(context, {"size": 16, "loader": 1}, Ledger())
    first, train, test = (
        DataLoader(TEST, 5),
        DataLoader(TRAIN, 4, shuffle=True, drop_last=True),
        DataLoader(TEST, 4),
    )
    assert (sizes(first)[0], sizes(train), sizes(test)[0]) == (5, [16, 16], 4)
    assert sizes(DataLoader(TRAIN, 4, shuffle=True, drop_last=True)) == [16, 16]
    assert sizes(DataLoader(TRAIN, 4)) == [4] * 10  # no shuffling, so it is another loader
    assert [seen["batch_size"] for seen in context.loaders] == [5, 16, 4, 16, 4]
    assert context.reports == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {},
        {"batch_size": 4, "sampler": DistributedSampler(TRAIN, 1, 0, shuffle=False)},
        {"batch_size": 4, "sampler": list(range(40))},
        {"batch_sampler": BatchSampler(SequentialSampler(TRAIN), 4, drop_last=False)},
    ],
    ids=["given", "not given", "ranks", "list", "batches"],
)
def test_the_order_stays(context, arguments):
    LEVER.apply(context, {"size": 16}, Ledger())
    found = list(DataLoader(TRAIN, **arguments))
    assert list(map(len, found)) == [16, 16, 8]
    assert torch.cat(found).tolist() == list(range(40))


def test_a_batch_sampler_keeps_its_sampler(context):
    drawn = RandomSampler(TRAIN, generator=torch.Generator().manual_seed(3))
    LEVER.apply(context, {"size": 16}, Ledger())
    assert sizes(DataLoader(TRAIN, batch_sampler=BatchSampler(drawn, 4, drop_last=True))) == [16, 16]
    assert context.loaders[0]["batch_size"] == 16
    assert sizes(DataLoader(Stream(), batch_size=4))[0] == 4  # the second loader, and another data set


def test_a_stream_is_batched_by_the_loader(context):
    LEVER.apply(context, {"size": 16}, Ledger())
    assert sizes(DataLoader(Stream(), batch_size=4)) == [16, 16, 8]


@pytest.mark.parametrize(
    ("data", "arguments", "why"),
    [
        (TRAIN, {"batch_size": 4, "sampler": Own()}, OWN_SAMPLER.format(name="Own")),
        (TRAIN, {"batch_sampler": BatchSampler(Own(), 4, False)}, OWN_SAMPLER.format(name="Own")),
        (TRAIN, {"batch_sampler": [[0, 1], [2]] * 20}, OWN_BATCHES.format(name="list")),
        (TRAIN, {"batch_size": None}, BATCHES_ITSELF),
        (Stream(), {"batch_size": None}, BATCHES_ITSELF),
    ],
    ids=["sampler", "inside", "list", "none", "stream"],
)
def test_loaders_that_cannot_change_their_size_say_why(context, data, arguments, why):
    LEVER.apply(context, {"size": 16}, Ledger())
    loader = DataLoader(data, **arguments)
    assert context.reports == [("batch_size", why)]
    train(loader)
    assert LEVER.applies(Facts(), context) == Skip(why)


def train(*loaders, model=None):
    """One epoch over the first loader, with an evaluation over the second after each batch, gradients
    enabled.
    """
    model = model or torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in loaders[0]:
        optimizer.zero_grad()
        model(batch.reshape(-1, 1)).sum().backward()
        optimizer.step()
        for other in loaders[1:]:
            model(next(iter(other)).reshape(-1, 1))


def test_the_loader_that_trains_is_known(context):
    test, loader = DataLoader(TEST, 5), DataLoader(TRAIN, 4, sampler=WeightedRandomSampler([1.0] * 40, 40))
    assert context.training_loader is None
    train(loader, test)
    assert context.describe()["training_loader"] == 1
    assert LEVER.applies(Facts(), context) == Options(({"size": 8, "loader": 1}, {"size": 2, "loader": 1}))
    del loader
    assert isinstance(LEVER.applies(Facts(), context), Options)


def test_a_loader_that_makes_its_iterator_by_itself_is_known(context):
    class Endless(DataLoader):
        def __iter__(self):
            yield from self._get_iterator()

    train(Endless(TRAIN, 4))
    assert context.training_loader == 0


def test_the_known_bad_is_bad(context):
    ledger = Ledger()
    KNOWN_BAD["batch_size"](context, {"size": 4}, ledger)
    assert [batch.tolist() for batch in DataLoader(TRAIN, 2)][:2] == [[0.0, 0.0], [2.0, 2.0]]
