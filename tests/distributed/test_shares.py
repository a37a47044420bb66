"""Rules for splitting a batch, and for the two streams of random numbers."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.distributed.batches import HostStreams, SplitBatches, Streams, share
from flatout.distributed.division import SplitSettings
from flatout.levers.data_parallel import LEVER

torch = pytest.importorskip("torch")


@given(samples=st.integers(1, 500), world=st.integers(1, 17))
@example(samples=3, world=5)
@example(samples=7, world=3)
def test_the_shares_are_the_batch(samples, world):
    """Shares are in order, without duplicates and as even as possible; their weights sum to one.

    A batch that is too small goes to all ranks and counts once.
    """
    shares = [share(samples, rank, world) for rank in range(world)]
    assert sum(part.weight for part in shares) == pytest.approx(1.0)
    if samples < world:
        assert all((part.start, part.stop) == (0, samples) for part in shares)
        assert sorted(part.weight for part in shares) == [0.0] * (world - 1) + [1.0]
    else:
        assert [at for part in shares for at in range(part.start, part.stop)] == list(range(samples))
        assert max(part.size for part in shares) - min(part.size for part in shares) <= 1
        assert all(part.weight == pytest.approx(part.size / samples) for part in shares)


@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 13),
    world=st.integers(1, 5),
    drop_last=st.booleans(),
    ahead=st.integers(1, 4),
)
def test_prefetched_batches_keep_their_shares(length, batch, world, drop_last, ahead):
    """Workers prepare several batches before the first is used; used in order, each finds its own share."""
    whole = torch.utils.data.BatchSampler(range(length), batch, drop_last)
    for rank in range(world):
        divided = SplitBatches(whole, rank, world)
        assert len(divided) == len(whole)
        iterator, waiting, taken = iter(divided), [], []
        for indices in iterator:
            waiting.append(indices)
            if len(waiting) >= ahead:
                taken.append((waiting.pop(0), iterator.shares.popleft()))
        taken += [(indices, iterator.shares.popleft()) for indices in waiting]
        for (indices, part), plain in zip(taken, whole, strict=True):
            assert indices == plain[part.start : part.stop]
            assert part.samples == len(plain)


@given(draws=st.lists(st.sampled_from(["own", "common"]), max_size=12))
def test_the_common_stream_is_the_plain_one(draws):
    """This holds whatever random numbers a rank uses for itself in between, and no two ranks use the same
    ones for themselves.
    """
    torch.manual_seed(7)
    plain = [float(torch.rand(())) for _ in draws]
    drawn = {}
    for rank in (0, 1):
        torch.manual_seed(7)
        streams, common, own = Streams(torch, rank), [], []
        for what in draws:
            with getattr(streams, what)():
                (own if what == "own" else common).append(float(torch.rand(())))
        assert common == plain[: len(common)]
        drawn[rank] = own
    assert not set(drawn[0]) & set(drawn[1])


def test_random_decisions_of_the_script_agree_on_all_ranks():
    """Samples use `random` differently on each rank; random numbers used between them are unaffected."""
    seen = []
    for rank in (0, 1):
        random.seed(3)
        host, between, within = HostStreams(rank), [], []
        for _ in range(20):
            with host.own():
                within.append(random.random())
            between.append(random.random())
        seen.append((between, within))
    random.seed(3)
    assert seen[0][0] == seen[1][0] == [random.random() for _ in range(20)]
    assert not set(seen[0][1]) & set(seen[1][1])


@pytest.mark.parametrize(
    "value", [False, {"reduction": "median"}, {"loaders": "first"}, {"what": 1}, {"batches": 3}]
)
def test_an_invalid_split_is_rejected_with_an_error(value):
    with pytest.raises(TypeError, match=r"\w+ \w+"):
        LEVER.check(value)


@given(
    value=st.fixed_dictionaries(
        {},
        optional={
            "reduction": st.sampled_from(["mean", "sum"]),
            "batches": st.sampled_from(["index", "cut", "input"]),
            "loaders": st.lists(st.integers(0, 9), max_size=3).map(lambda found: ",".join(map(str, found))),
        },
    )
)
def test_a_split_has_the_values_that_it_read(value):
    division = SplitSettings.read(value)
    assert {name: getattr(division, name) for name in value if name != "loaders"} == {
        name: value[name] for name in value if name != "loaders"
    }
