"""Whole tensors are restored from the slices that ranks saved, whatever the slices are."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flatout.checkpoint.slices import Slice, filled  # noqa: E402
from flatout.checkpoint.unpacking import unpack  # noqa: E402
from flatout.schema.errors import SaveError  # noqa: E402


def cut(tensor, cuts, offsets=()):
    """All parts of a tensor cut at these places, dimension by dimension."""
    if len(offsets) == tensor.dim():
        return [(tensor, offsets)]
    edges = [0, *sorted(cuts[len(offsets)]), tensor.shape[len(offsets)]]
    parts = [(tensor.narrow(len(offsets), start, end - start), start) for start, end in pairwise(edges)]
    return [found for part, start in parts for found in cut(part, cuts, (*offsets, start))]


@st.composite
def split_tensors(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cuts = [
        draw(st.sets(st.integers(1, size), max_size=3)) for size in shape
    ]  # an edge at the end leaves an empty part
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    return whole, draw(
        st.permutations([Slice(part.clone(), tuple(shape), offsets) for part, offsets in cut(whole, cuts)])
    )


@settings(max_examples=150, deadline=None)
@given(split_tensors(), st.data())
def test_any_covering_slices_give_the_whole_and_none_may_be_missing(case, data):
    whole, slices = case
    state, parts = {"a": [slices[0], 3]}, [{"a": {0: each}} for each in slices[1:]]
    again = data.draw(st.permutations([*parts, *parts[:2]]))
    found = filled(torch, state, lambda where: None, again)
    assert torch.equal(found["a"][0], whole)
    assert found["a"][1] == 3
    lacking = [each for each in slices[1:] if each.local.numel()]
    if lacking:
        left = data.draw(st.sampled_from(lacking))
        with pytest.raises(SaveError, match=r"slices of a\.0 are missing in the checkpoint"):
            filled(
                torch,
                {"a": [slices[0], 3]},
                lambda where: None,
                [{"a": {0: each}} for each in slices[1:] if each is not left],
            )


def test_local_slices_are_not_requested():
    def never():
        raise AssertionError
        yield

    whole = Slice(torch.ones(3), (3,), (0,))
    assert torch.equal(filled(torch, {"a": whole}, lambda where: None, never())["a"], torch.ones(3))
    assert filled(torch, {"a": torch.ones(2)}, lambda where: torch.ones(2), never())["a"].tolist() == [1, 1]


def test_a_slice_of_another_shape_is_rejected():
    with pytest.raises(
        SaveError, match=r"a\.weight was sharded and has shape \[4\], but its tensor has shape \[5\]"
    ):
        filled(torch, {"a": {"weight": Slice(torch.ones(4), (4,), (0,))}}, lambda where: torch.ones(5), [])


@pytest.mark.parametrize(
    "changed", [{"at": [2]}, {"at": [-1]}, {"shape": [1]}, {"shape": [4, 1]}, {"at": []}, {"at": [0.0]}]
)
def test_a_slice_outside_of_its_whole_is_not_read(changed):
    tensors = {"t": torch.ones(3)}
    tree = {"slice": {"tensor": "t", "dtype": "float32", "shape": [3]}, "shape": [4], "at": [1]}
    found = unpack(torch, tree, tensors)
    assert (found.shape, found.offsets, found.local.tolist()) == ((4,), (1,), [1, 1, 1])
    with pytest.raises(SaveError, match="cannot be read"):
        unpack(torch, {**tree, **changed}, tensors)
