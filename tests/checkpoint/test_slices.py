"""Slices of sharded tensors are restored where they were, or rejected."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flatout.checkpoint.slices import Slice, sharded_again  # noqa: E402
from flatout.checkpoint.unpacking import unpack  # noqa: E402
from flatout.schema.errors import SaveError  # noqa: E402


def test_a_slice_of_another_tensor_is_rejected():
    """tests/loop/test_loop_sharded.py restores slices on ranks."""
    state = {"a": [{"weight": Slice(torch.ones(4), (8,), (0,))}]}
    for now, words in (
        (None, r"a\.0\.weight was sharded and has shape \[8\]; its tensor is missing now"),
        (torch.ones(5), r"its tensor has shape \[5\] now, and is not sharded"),
    ):
        with pytest.raises(SaveError, match=words):
            sharded_again(state, None, lambda where, now=now: now)


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
