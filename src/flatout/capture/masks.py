"""Indexing by a mask, heard where torch dispatches it.

Nothing may stand in the place of `Tensor.__getitem__`: a class with such a Python function is a sequence to C, for good, also when the function is gone again.
Then `torch.tensor([loss])` asks a loss how long it is, and fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from flatout.capture.ledger import Ledger

MASKS = "bool", "uint8"  # types of tensors that say where, and not which
Heard = Callable[[Callable[[], Any], Any, FrameType], Any]


def hear_masks(torch: Any, ledger: Ledger, heard: Heard, others: Callable[[Any, FrameType], None] = lambda found, frame: None) -> None:
    """``heard(really, mask, frame)`` is called in the place of each indexing in which the first of the tensors with a mask's type is ``mask``, by code in
    ``frame``; ``really()`` does it. ``others(found, frame)`` is told what one by other tensors has found. Costs 4 us of each indexing by tensors, nothing of
    one by numbers and slices."""
    index, masks = torch.ops.aten.index.Tensor, tuple(getattr(torch, name) for name in MASKS)
    # Below autograd, above the devices: all tensors pass through this key, and nobody has a kernel there.
    key = torch._C.DispatchKey.BackendSelect
    below = torch._C._dispatch_keyset_full_after(key)

    def kernel(keys: Any, tensor: Any, indices: Sequence[Any]) -> Any:
        for each in indices:
            if each is not None and each.dtype in masks and not each.is_meta:
                return heard(lambda: index.redispatch(keys & below, tensor, indices), each, sys._getframe(1))
        found = index.redispatch(keys & below, tensor, indices)
        others(found, sys._getframe(1))
        return found

    library = torch.library.Library("aten", "IMPL")
    library.impl("index.Tensor", kernel, key.name, with_keyset=True)
    ledger.call("aten::index", library._destroy)


def has_mask(index: Any) -> bool:
    """Whether there is a mask in what somebody indexes with: then the number of results follows from values. Raises nothing."""
    if isinstance(index, (tuple, list)):
        return any(map(has_mask, index)) or (isinstance(index, list) and any(isinstance(each, bool) for each in index))
    return str(getattr(index, "dtype", "")).removeprefix("torch.") in MASKS and getattr(index, "ndim", 0) > 0
