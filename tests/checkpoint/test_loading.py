"""Resuming in the middle of an epoch: whatever the loader, the same batches follow, and the same random
numbers after them.
"""

import json
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create"), pytest.mark.processes]

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)

from flatout.checkpoint.loading import LoaderPosition  # noqa: E402
from flatout.checkpoint.values import pack, unpack  # noqa: E402
from flatout.data.streams import own_generators  # noqa: E402

SAMPLES = 11


class Augmented(Dataset):
    """Samples that use every random generator, and that are counted."""

    def __init__(self, draws):
        self.draws, self.own, self.fetched = draws, random.Random(5), 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.fetched += 1
        found = [float(index), float(self.fetched if "counter" in self.draws else 0)]
        found.append(float(torch.rand(())) if "torch" in self.draws else 0.0)
        found.append(random.random() if "python" in self.draws else 0.0)
        found.append(float(np.random.rand()) if "numpy" in self.draws else 0.0)
        found.append(self.own.random() if "own" in self.draws else 0.0)
        return torch.tensor(found, dtype=torch.float64)


class Stream(IterableDataset):
    def __init__(self, draws):
        self.draws = draws

    def __iter__(self):
        for index in range(SAMPLES):
            yield torch.tensor(
                [float(index), random.random() if "python" in self.draws else 0.0], dtype=torch.float64
            )


class Backwards:
    """A sampler with its own memory and generator, both used at its start."""

    def __init__(self):
        self.begun, self.generator = 0, random.Random(1)

    def __iter__(self):
        self.begun += 1
        order = list(range(SAMPLES))[::-1]
        if self.begun % 2:
            self.generator.shuffle(order)
        return iter(order)

    def __len__(self):
        return SAMPLES


class AsItGoes:
    """A sampler that takes each index from the global generator."""

    def __iter__(self):
        return (random.randrange(SAMPLES) for _ in range(SAMPLES))

    def __len__(self):
        return SAMPLES


def noisy(samples):
    """A collate function that uses random numbers."""
    batch = torch.stack(samples)
    return batch + torch.rand(()) + np.random.rand()


def seeded(worker):
    """The seeding from PyTorch's page on reproducibility."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def loader_of(
    kind, draws, batch, workers, persistent=False, drop_last=False, collate=None, init=None, context=None
):
    more = {"num_workers": workers, "drop_last": drop_last, "collate_fn": collate}
    if workers:
        more |= {"persistent_workers": persistent, "worker_init_fn": init, "multiprocessing_context": context}
    data = Augmented(draws)
    if kind == "generator":
        return DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(3), **more)
    if kind == "replacement":
        shared = torch.Generator().manual_seed(4)
        return DataLoader(
            data,
            batch,
            sampler=RandomSampler(data, replacement=True, num_samples=70, generator=shared),
            generator=shared,
            **more,
        )
    if kind == "batch sampler":
        del more["drop_last"]
        return DataLoader(
            data, batch_sampler=BatchSampler(SubsetRandomSampler(range(1, SAMPLES)), batch, drop_last), **more
        )
    if kind == "distributed":
        return DataLoader(
            data, batch, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=2), **more
        )
    if kind == "memory":
        return DataLoader(data, batch, sampler=Backwards(), **more)
    if kind == "as it goes":
        return DataLoader(data, batch, sampler=AsItGoes(), **more)
    if kind == "stream":
        return DataLoader(Stream(draws), batch, **more)
    if kind == "rows":
        return [torch.full((2,), float(at)) for at in range(5)]
    if kind == "single samples":
        del more["drop_last"]
        return DataLoader(data, None, shuffle=True, **{**more, "collate_fn": None})
    return DataLoader(data, batch, shuffle=kind == "shuffled", **more)


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draw():
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def course(reading, epochs, training, at=None):
    """Batches, the random numbers that the training used, and the position after ``at`` of them all, as
    another process would read it.
    """
    seen, place, count = [], None, 0
    for epoch in range(epochs):
        if (
            isinstance(getattr(reading.loader, "sampler", None), DistributedSampler)
            and not reading.consumed
            and reading._target is None
        ):
            reading.loader.sampler.set_epoch(epoch)
        for batch in reading.epoch():
            seen.append((batch.tolist(), draw() if training else None))
            count += 1
            if count == at:
                packed = pack(torch, reading.place())
                assert packed.left_out == {}
                place = unpack(
                    torch,
                    json.loads(json.dumps(packed.tree)),
                    {name: tensor.clone() for name, tensor in packed.tensors.items()},
                )
        reading.end_epoch()
    return seen, place, draw()


def resumes(make, at, training, epochs=2):
    """Whether a new process continues as the undisturbed one, what both report as inexact, and how many
    batches were fetched again.
    """
    seed_all(0)
    first = LoaderPosition(torch, make(), own_generators)
    whole, place, after = course(first, epochs, training, at)
    seed_all(99)
    draw()
    second = LoaderPosition(torch, make(), own_generators)
    assert second.resume(place) == []
    per_epoch = len(whole) // epochs
    done = (at - 1) // per_epoch
    rest, _, later = course(second, epochs - done, training)
    return rest == whole[at:] and later == after, first.inexact + second.inexact, second.refetched


KINDS = [
    "plain",
    "shuffled",
    "generator",
    "replacement",
    "batch sampler",
    "distributed",
    "memory",
    "single samples",
]
DRAWS = st.sets(st.sampled_from(["torch", "python", "numpy", "own", "counter"]))


@settings(max_examples=60)
@given(
    kind=st.sampled_from([*KINDS, "rows"]),
    draws=DRAWS,
    batch=st.integers(1, 4),
    drop_last=st.booleans(),
    noise=st.booleans(),
    at=st.integers(1, 60),
)
@example(
    kind="shuffled",
    draws={"torch", "python", "numpy", "own", "counter"},
    batch=3,
    drop_last=False,
    noise=True,
    at=2,
)
def test_without_workers(kind, draws, batch, drop_last, noise, at):
    def make():
        return loader_of(kind, draws, batch, 0, drop_last=drop_last, collate=noisy if noise else None)

    at = 1 + at % (2 * len(make()))
    assert resumes(make, at, training=True) == (True, [], 0)


@settings(max_examples=3)
@given(
    kind=st.sampled_from(KINDS),
    draws=DRAWS,
    batch=st.integers(1, 4),
    workers=st.sampled_from([1, 2, 4]),
    persistent=st.booleans(),
    noise=st.booleans(),
    own_seeds=st.booleans(),
    at=st.integers(1, 60),
)
@example(
    kind="shuffled",
    draws={"torch", "python", "numpy", "own", "counter"},
    batch=2,
    workers=2,
    persistent=True,
    noise=True,
    own_seeds=True,
    at=9,
)
@example(
    kind="memory",
    draws={"torch", "python", "numpy", "own", "counter"},
    batch=2,
    workers=4,
    persistent=True,
    noise=True,
    own_seeds=True,
    at=3,
)
@example(
    kind="generator", draws={"torch"}, batch=2, workers=2, persistent=True, noise=False, own_seeds=False, at=6
)
@example(
    kind="plain", draws={"torch"}, batch=1, workers=4, persistent=False, noise=False, own_seeds=False, at=2
)
def test_with_forked_workers(kind, draws, batch, workers, persistent, noise, own_seeds, at):
    def make():
        return loader_of(
            kind,
            draws,
            batch,
            workers,
            persistent,
            collate=noisy if noise else None,
            init=seeded if own_seeds else None,
            context="fork",
        )

    at = 1 + at % (2 * len(make()))
    same, inexact, again = resumes(make, at, training=True)
    assert same
    assert inexact == []
    assert again < workers


@pytest.mark.parametrize("workers", [0, 2])
def test_calls_to_the_sampler_at_the_end_of_an_epoch_are_kept(workers):
    """`set_epoch` after the last batch, before the next epoch starts, and a position between the two."""

    def course(reading, epochs, at=None):
        seen, place = [], None
        for _ in range(epochs):
            for batch in reading.epoch():
                seen.append(batch.tolist())
                if reading.consumed == len(reading.loader):
                    reading.loader.sampler.set_epoch(reading.loader.sampler.epoch + 1)
                if len(seen) == at:
                    place = reading.place()
            reading.end_epoch()
        return seen, place

    def reading():
        return LoaderPosition(
            torch, loader_of("distributed", set(), 2, workers, context="fork"), own_generators
        )

    first = reading()
    per_epoch = len(first.loader)
    whole, place = course(first, 3, at=per_epoch)
    assert whole[per_epoch : 2 * per_epoch] != whole[2 * per_epoch :]
    second = reading()
    assert second.resume(place) == []
    assert course(second, 3)[0] == whole[per_epoch:]


SPAWNED_DRAWS = {"torch", "python", "numpy", "own", "counter"}


def test_with_spawned_workers():
    """Each run starts two processes; everything sent to them and back is pickled."""

    def make():
        return loader_of("shuffled", SPAWNED_DRAWS, 2, 1, collate=noisy, init=seeded, context="spawn")

    assert resumes(make, 4, training=True, epochs=1) == (True, [], 0)


@pytest.mark.parametrize(("workers", "persistent", "at"), [(0, False, 5), (2, False, 4)])
def test_a_stream_is_fetched_again(workers, persistent, at):
    def make():
        return loader_of("stream", {"python"}, 3, workers, persistent, context="fork" if workers else None)

    assert resumes(make, at, training=False) == (True, [], (at - 1) % (8 if workers else 4) + 1)


@pytest.mark.parametrize(
    ("kind", "draws", "more", "words"),
    [
        ("as it goes", set(), {}, "the sampler draws random numbers during iteration (python)"),
        ("stream", {"python"}, {}, "the loader draws random numbers during iteration (python)"),
        (
            "stream",
            {"python"},
            {"workers": 1, "persistent": True},
            "their state at the start of this epoch is unknown",
        ),
    ],
)
def test_inexact_resumes_are_named(kind, draws, more, words):
    """In between, the training uses the same generators."""

    def make():
        return loader_of(kind, draws, 2, **{"workers": 0, **more}, context="fork" if more else None)

    _, inexact, _ = resumes(make, 9, training=True)
    assert any(words in sentence for sentence in inexact), inexact


def test_a_loader_that_keeps_its_own_position():
    class Keeping:
        def __init__(self):
            self.at = 0

        def __len__(self):
            return 6

        def __iter__(self):
            while self.at < 6:
                self.at += 1
                yield torch.rand(1)
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    assert resumes(Keeping, 4, training=True) == (True, [], 0)


def test_differences_are_reported():
    seed_all(0)
    _, place, _ = course(
        LoaderPosition(torch, loader_of("shuffled", set(), 2, 0), own_generators), 1, False, 2
    )
    other = LoaderPosition(
        torch, DataLoader(Augmented(set()), 3, num_workers=1, multiprocessing_context="fork"), own_generators
    )
    said = "; ".join(other.resume(place))
    for words in (
        "batch size of the loader: 2 when it was saved, 3 now",
        "loader workers: 0 when",
        "batches in an epoch: 6 when",
        "SequentialSampler'] now",
    ):
        assert words in said
    assert "the data ended" not in str(list(other.epoch()) and other.inexact)
