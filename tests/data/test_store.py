"""A store returns its contents bit for bit, as torch's own collation would have made them, or
rejects them.
"""

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchvision")

from feeding import difference, pil_images

from flatout.data.batch_comparison import same_bits
from flatout.data.changes import DatasetState
from flatout.data.operation import NotBatchable
from flatout.data.store import Constant, Store, map_values

MIB = 2**20
Named = namedtuple("Named", "a b")

odd_floats = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.just(-0.0), st.just(float("nan")))
values = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
    "float": odd_floats,
    "tensor": st.lists(odd_floats, min_size=3, max_size=3).map(torch.tensor),
    "bytes": st.lists(st.integers(0, 255), min_size=4, max_size=4).map(
        lambda v: torch.tensor(v, dtype=torch.uint8).view(2, 2)
    ),
    "half": st.lists(st.floats(-100, 100, width=16), min_size=2, max_size=2).map(
        lambda v: torch.tensor(v, dtype=torch.bfloat16)
    ),
    "complex": st.complex_numbers(max_magnitude=100).map(lambda v: torch.tensor([v])),
    "array": st.lists(st.integers(-9, 9), min_size=2, max_size=2).map(lambda v: np.array(v, dtype=np.int16)),
    "scalar": odd_floats.map(np.float32),
    "empty": st.just(None).map(lambda _: torch.empty(0, 3)),
}


@st.composite
def samples(draw):
    """A few samples of one form."""
    names = draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=4))
    wrap = draw(
        st.sampled_from(
            [
                tuple,
                list,
                lambda v: {f"k{at}": each for at, each in enumerate(v)},
                lambda v: (v[0], [v[1:]]),
                lambda v: Named(v[0], tuple(v)),
            ]
        )
    )
    return [wrap([draw(values[name]) for name in names]) for _ in range(draw(st.integers(1, 5)))]


def has(store, rows):
    return bool((rows < store.rows).all()) and bool(store.filled[rows].all())


def values_of(sample):
    found = []
    map_values(sample, found.append)
    return found


def octets(value):
    """Every bit of a value."""
    if isinstance(value, torch.Tensor):
        value = value.reshape(-1).view(torch.uint8).numpy()
    return np.asarray(value).tobytes()


@given(samples(), st.booleans())
def test_stored_samples_are_returned_bit_for_bit(held, shared):
    store = Store(held[0], len(held), MIB, shared)
    assert store.rows == len(held)
    order = torch.arange(len(held)).flip(0)
    assert not has(store, order)
    store.put(range(len(held)), held)
    assert has(store, order)
    back = store.samples(order)
    for at, sample in enumerate(reversed(held)):
        assert [type(v) for v in values_of(back[at])] == [type(v) for v in values_of(sample)]
        assert list(map(octets, values_of(back[at]))) == list(map(octets, values_of(sample)))
    assert all(store.holds(at, sample) for at, sample in enumerate(held))


@settings(max_examples=25)
@given(samples())
def test_a_different_sample_does_not_match(held):
    store = Store(held[0], 1, MIB, False)
    store.put([0], held[:1])
    for other in held[1:]:
        alike = list(map(octets, values_of(held[0]))) == list(map(octets, values_of(other)))
        assert store.holds(0, other) == alike


def test_minus_zero_and_nan():
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1]), torch.tensor([1.0]))
    assert not same_bits(torch.tensor([1]), torch.tensor([[1]]))
    assert same_bits(torch.tensor(1 + 2j), torch.tensor(1 + 2j))
    assert same_bits(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous())


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images_come_back_as_images(mode):
    images = pil_images(5, mode=mode)
    store = Store((images[0], 0), 5, MIB, False)
    store.put(range(5), [(image, at) for at, image in enumerate(images)])
    for at, (image, label) in enumerate(store.samples(torch.arange(5))):
        assert (image.mode, image.size, image.tobytes(), label) == (
            mode,
            images[at].size,
            images[at].tobytes(),
            at,
        )


def test_a_constant_must_be_the_same_in_every_sample():
    store = Store((Constant(3), 1), 3, MIB, False)
    store.put([1], [(Constant(3), 5)])
    assert store.samples(torch.tensor([1])) == [(Constant(3), 5)]
    for other in ((Constant(4), 1), (1, 1), (Constant(3), Constant(3))):
        with pytest.raises(NotBatchable, match="different pipelines"):
            store.put([2], [other])
    assert not has(store, torch.tensor([2]))


class Child(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        "words",
        None,
        object(),
        2**70,
        torch.tensor([1.0], requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.zeros(1).as_subclass(Child),
        np.array(["a"]),
        np.array([None]),
        {1, 2},
        OrderedDict(a=1),
        b"bytes",
        pil_images(1)[0].convert("P"),
        pil_images(1)[0].convert("CMYK"),
        torch.nn.Parameter(torch.zeros(1)),
        np.datetime64("2020-01-01"),
        (((((((1,),),),),),),),
    ],
    ids=lambda value: type(value).__name__,
)
def test_samples_that_cannot_be_kept_exactly_are_rejected(value):
    with pytest.raises(NotBatchable, match="a sample"):
        Store((1, value), 3, MIB, False)


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(3), 1.0),
        (torch.zeros(2), 1),
        (torch.zeros(3, dtype=torch.float64), 1),
        [torch.zeros(3), 1],
        (torch.zeros(3), True),
        (torch.zeros(3),),
        (torch.zeros(3), 1, 2),
        {"a": torch.zeros(3)},
        (np.zeros(3, np.float32), 1),
        (torch.zeros(3), np.int64(1)),
        torch.zeros(3),
    ],
    ids=repr,
)
def test_a_sample_unlike_the_first_is_rejected(other):
    store = Store((torch.ones(3), 1), 3, MIB, False)
    with pytest.raises(NotBatchable, match=r"alike|differ"):
        store.put([0], [other])
    assert not store.holds(0, other)
    assert not has(store, torch.tensor([0]))


def test_keys_of_a_dictionary_belong_to_a_sample():
    store = Store({"a": 1, "b": 2}, 2, MIB, False)
    with pytest.raises(NotBatchable):
        store.put([0], [{"a": 1, "c": 2}])


def test_only_as_many_rows_as_fit():
    sample = (torch.zeros(1000, dtype=torch.uint8), 1)
    store = Store(sample, 100, 20_000, False)
    assert store.rows == 20_000 // store.row_bytes == 19
    assert store.bytes <= 20_000
    assert store.bytes_of_all == 100 * store.row_bytes
    store.put([18], [sample])
    assert has(store, torch.tensor([18]))
    assert not has(store, torch.tensor([18, 19]))
    assert Store(sample, 100, 10, False).rows == 0


def test_data_that_does_not_fit_into_memory_is_on_disk(tmp_path):
    make = torch.Generator().manual_seed(0)
    held = [(torch.rand(50, generator=make), at, torch.empty(0)) for at in range(20)]
    store = Store(held[0], 20, 100, False, str(tmp_path))
    assert store.rows == 20
    assert store.bytes == 0
    store.put(range(20), held)
    back = store.samples(torch.tensor([19, 0, 7]))
    assert difference([held[at] for at in (19, 0, 7)], back) == ""
    assert (
        list(tmp_path.iterdir()) == []
    )  # its name is already deleted: nothing is left, however the program ends


def test_rows_are_copies():
    store = Store((torch.zeros(3),), 1, MIB, False)
    mine = torch.zeros(3)
    store.put([0], [(mine,)])
    mine += 1
    store.samples(torch.tensor([0]))[0][0].add_(5)
    assert store.holds(0, (torch.zeros(3),))


@pytest.mark.processes
def test_another_process_fills_it():
    store = Store((torch.zeros(3), 0), 4, MIB, True)
    worker = torch.multiprocessing.get_context("fork").Process(
        target=store.put, args=([2], [(torch.full((3,), 7.0), 9)])
    )
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    assert store.holds(2, (torch.full((3,), 7.0), 9))
    assert not has(store, torch.tensor([1]))


def test_one_element_may_have_any_stride():
    """torch calls such a tensor contiguous, and still refuses to view it as bytes."""
    held = torch.arange(4.0, dtype=torch.float64)
    one = held[::2][:1]
    assert one.is_contiguous()
    assert one.stride() == (2,)
    assert same_bits(one, torch.zeros(1, dtype=torch.float64))
    assert not same_bits(one, -torch.zeros(1, dtype=torch.float64))
    dataset = SimpleNamespace(scale=one)
    state = DatasetState(dataset)
    assert not state.changed()
    held.numpy()[0] = 5.0  # torch does not notice
    assert state.changed()
