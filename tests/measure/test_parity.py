"""Digests and distances: the memory layout does not count, everything else does."""

import math
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure import parity
from flatout.measure.nests import tensors_in
from flatout.measure.parity import (
    STATISTICS_SAMPLES,
    batch_statistics,
    digest,
    relative_distance,
)

torch = pytest.importorskip("torch")

seeds = st.integers(0, 2**31)


def random_tensor(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(seeds, st.tuples(*[st.integers(1, 4)] * 4))
def test_the_memory_layout_does_not_count(seed, shape):
    x = random_tensor(seed, shape)
    assert digest([x], torch) == digest([x.contiguous(memory_format=torch.channels_last)], torch)
    assert digest([x], torch) == digest([x.transpose(0, 1).contiguous().transpose(0, 1)], torch)
    assert digest([x], torch) == digest([torch.cat([x, x])[: shape[0]]], torch)


DTYPES = [
    getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
]


def from_bytes(data, dtype):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


@st.composite
def bits(draw, rows=1):
    """Equally long rows of bytes, any numbers and every kind of NaN among them, and a dtype for them."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(1, 20)) * dtype.itemsize
    values = st.integers(0, 1 if dtype == torch.bool else 255)
    return [draw(st.lists(values, min_size=size, max_size=size)) for _ in range(rows)], dtype


@pytest.fixture(autouse=True, scope="module")
def short_rows():
    """Tensors of a few elements have several rows."""
    with mock.patch.multiple(parity, ROW=4, DEVICE_PART=8):
        yield


@given(bits(), st.data())
def test_one_bit_changes_the_digest(case, data):
    (row,), dtype = case
    other, at = list(row), data.draw(st.integers(0, len(row) - 1))
    other[at] ^= 1 << data.draw(st.integers(0, 0 if dtype == torch.bool else 7))
    x, y = from_bytes(row, dtype), from_bytes(other, dtype)
    assert digest([x], torch) != digest([y], torch)
    assert digest([x, y], torch) != digest([y, x], torch)


@given(bits(2))
def test_equal_digests_have_equal_bits(case):
    (one, other), dtype = case
    x, y = from_bytes(one, dtype), from_bytes(other, dtype)
    assert (digest([x], torch) == digest([y], torch)) == (one == other)
    parts = [from_bytes(row, dtype) for row in (one, other)]
    in_order = digest([torch.cat(parts)], torch) == digest([torch.cat(parts[::-1])], torch)
    assert in_order == (one == other)


places = st.integers(0, 39)


@given(st.sampled_from(DTYPES[1:]), places, places, st.integers(0, 127))
def test_the_same_change_in_two_places_does_not_cancel_out(dtype, one, other, bit):
    """The signs of two numbers, for example."""
    changed = torch.zeros(40, dtype.itemsize, dtype=torch.uint8)
    for place in (one, other):
        changed[place, bit // 8 % dtype.itemsize] ^= 1 << bit % 8
    digests = [digest([x.flatten().view(dtype)], torch) for x in (changed, torch.zeros_like(changed))]
    assert (digests[0] == digests[1]) == (one == other)


@given(places, places)
def test_the_order_of_elements_counts(one, other):
    x = torch.arange(40.0)
    y = x.clone()
    y[one], y[other] = x[other], x[one]
    assert (digest([x], torch) == digest([y], torch)) == (one == other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_and_empty_tensors_of_every_dtype(dtype):
    x = from_bytes(torch.arange(96 * dtype.itemsize).remainder(2).tolist(), dtype).view(4, 24)
    for view in (x[1:], x[:, ::3], x.T, x[0, 5], x[:0], x[:, 1:2].expand(4, 3)):
        copied = torch.empty(view.shape, dtype=dtype).copy_(view)
        assert digest([view], torch) == digest([copied], torch)
    assert digest([x[:0]], torch) != digest([x[:, :0]], torch)


def test_a_conjugate_view_counts_as_its_values():
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert digest([x.conj()], torch) == digest([x.conj().resolve_conj()], torch) != digest([x], torch)
    assert digest([x.conj().imag], torch) == digest([-x.imag], torch)


def test_digests_stay_the_same():
    """Certificates keep them. The row of 40 numbers has ten rows of factors."""
    found = [digest([torch.arange(40.0).to(dtype)], torch) for dtype in (torch.float32, torch.bfloat16)]
    assert found == ["3fccb358fe9e4dec", "622c3aa41083f48e"]


def test_dtype_shape_and_order_count():
    x = torch.zeros(4)
    digests = [
        digest(tensors, torch)
        for tensors in (
            [x],
            [x.double()],
            [x.int()],
            [x.view(2, 2)],
            [x, x],
            [],
            [x[:3]],
            [x.bool()],
            [x.to(torch.bfloat16)],
        )
    ]
    assert len(set(digests)) == len(digests)
    y = torch.ones(4)
    assert digest([x, y], torch) != digest([y, x], torch)


@given(
    st.recursive(
        st.just(None) | st.integers() | st.just("tensor"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
        max_leaves=12,
    )
)
def test_tensors_are_found_in_order_in_any_batch(shape):
    made = []

    def build(thing):
        if thing == "tensor":
            made.append(torch.full((1,), float(len(made))))
            return made[-1]
        if isinstance(thing, list):
            return [build(t) for t in thing]
        if isinstance(thing, dict):
            return {k: build(v) for k, v in thing.items()}
        return thing

    batch = build(shape)
    found = list(tensors_in(batch))
    assert [id(t) for t in found] == [id(t) for t in made][: len(found)]
    assert len(found) <= len(made)


def test_a_batch_that_holds_itself_ends():
    batch = [torch.zeros(1)]
    batch.append(batch)
    assert len(list(tensors_in(batch))) >= 1


# -- statistics of a batch


def test_a_flip_a_constant_and_a_crop_are_detected():
    x = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 1, 16)
    plain = torch.tensor(batch_statistics([x, torch.arange(8)], torch))
    assert plain.shape == (8, 4)
    flipped = torch.tensor(batch_statistics([x.flip(-1)], torch))
    assert torch.allclose(flipped[:, 2], -plain[:, 2], atol=1e-5)
    brighter = torch.tensor(batch_statistics([x + 0.25], torch))
    assert torch.allclose(brighter[:, 0], plain[:, 0] + 0.25, atol=1e-5)
    assert torch.allclose(brighter[:, 1:], plain[:, 1:], atol=1e-5)
    assert not torch.allclose(torch.tensor(batch_statistics([x[..., :8]], torch))[:, 0], plain[:, 0])


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ([], 0),
        (None, 0),
        ("text", 0),
        (torch.arange(5), 0),
        (torch.zeros(3, 2, dtype=torch.long), 0),
        (torch.zeros(3, 2, 4, dtype=torch.uint8), 3),
        ({"x": torch.zeros(2, 5)}, 2),
        (torch.zeros(1000, 2), STATISTICS_SAMPLES),
        (torch.zeros(2, 1), 2),
        (torch.zeros(0, 3), 0),
    ],
)
def test_batches_of_every_kind(batch, rows):
    found = batch_statistics(batch, torch)
    assert len(found) == rows
    assert all(len(row) == 4 and all(math.isfinite(v) for v in row) for row in found)


# -- distances


@given(seeds, st.floats(0.01, 100), st.floats(0.001, 10))
def test_distance_is_relative_and_homogeneous(seed, scale, error):
    reference = [random_tensor(seed, (5,)).double(), random_tensor(seed + 1, (2, 3)).double()]
    moved = [t * (1 + error) for t in reference]
    assert relative_distance(moved, reference, torch) == pytest.approx(error, rel=1e-6)
    assert relative_distance(
        [t * scale for t in moved], [t * scale for t in reference], torch
    ) == pytest.approx(error, rel=1e-6)


def test_missing_gradients_count_as_zero():
    x = torch.ones(4)
    assert relative_distance([None, x], [None, x], torch) == 0.0
    assert relative_distance([None], [x], torch) == 1.0
    assert relative_distance([x], [None], torch) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_infinitely_far(bad):
    assert relative_distance([torch.tensor([bad])], [torch.ones(1)], torch) == math.inf


def test_another_number_of_tensors_is_an_error():
    with pytest.raises(ValueError, match="argument"):
        relative_distance([torch.ones(1)], [], torch)
