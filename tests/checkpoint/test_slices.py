"""Slices of sharded tensors are restored where they were, or rejected."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flatout.checkpoint.slices import Slice, sharded_again  # noqa: E402
from flatout.checkpoint.unpacking import unpack  # noqa: E402
from flatout.schema.errors import SaveError  # noqa: E402


@pytest.fixture
def sharded():
    """A sharded tensor of shape [8], in a group of one rank."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    yield distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
    torch.distributed.destroy_process_group()


def test_a_slice_that_does_not_fit_is_rejected(sharded):
    """tests/loop/test_loop_sharded.py restores slices on several ranks."""

    def restored(piece, now):
        return sharded_again({"a": [{"weight": piece}]}, None, lambda where: now)["a"][0]["weight"]

    whole = Slice(torch.ones(8), (8,), (0,))
    assert restored(whole, sharded).full_tensor().tolist() == [1.0] * 8
    for piece, now, words in (
        (whole, None, r"a\.0\.weight was sharded and has shape \[8\]; its tensor is missing now"),
        (whole, torch.ones(5), r"its tensor has shape \[5\] now, and is not sharded"),
        (Slice(torch.ones(8), (9,), (0,)), sharded, r"has shape \[9\]; its tensor has shape \[8\] now"),
        (Slice(torch.ones(4), (8,), (4,)), sharded, r"a\.0\.weight is sharded in another way"),
    ):
        with pytest.raises(SaveError, match=words):
            restored(piece, now)


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
