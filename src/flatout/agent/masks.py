"""Records indexing with a mask at torch's dispatcher.

`Tensor.__getitem__` must not be replaced. A class with such a Python function stays a sequence for C code for
ever, even after the function is removed. Then `torch.tensor([loss])` asks a loss for its length and fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch import Tensor

MASKS = "bool", "uint8"  # dtypes of masks, as opposed to indices
Observer = Callable[[Callable[[], Any], Any, FrameType], Any]


def observe_masks(
    torch: ModuleType,
    ledger: Ledger,
    on_mask: Observer,
) -> None:
    """Hook indexing by tensors.

    ``on_mask(original, mask, frame)`` replaces each indexing with a mask; ``mask`` is the first tensor of a mask
    dtype, ``frame`` the calling frame, and ``original()`` does the indexing. Indexing by tensors costs 4 us more;
    indexing by numbers and slices costs nothing.
    """
    index, masks = torch.ops.aten.index.Tensor, tuple(getattr(torch, name) for name in MASKS)
    # Below autograd and above the devices: all tensors pass this dispatch key, and no kernel is registered
    # there.
    key = torch._C.DispatchKey.BackendSelect
    lower_keys = torch._C._dispatch_keyset_full_after(key)

    def kernel(keys: object, tensor: Tensor, indices: Sequence[Any]) -> Any:
        for position in indices:
            if position is not None and position.dtype in masks and not position.is_meta:
                return on_mask(
                    lambda: index.redispatch(keys & lower_keys, tensor, indices), position, sys._getframe(1)
                )
        return index.redispatch(keys & lower_keys, tensor, indices)

    library = torch.library.Library("aten", "IMPL")
    library.impl("index.Tensor", kernel, key.name, with_keyset=True)
    ledger.on_restore("aten::index", library._destroy)


def has_mask(index: object) -> bool:
    """Whether an index contains a mask, so that the number of results depends on values. Raises nothing."""
    if isinstance(index, (tuple, list)):
        return any(map(has_mask, index)) or (
            isinstance(index, list) and any(isinstance(part, bool) for part in index)
        )
    return str(getattr(index, "dtype", "")).removeprefix("torch.") in MASKS and getattr(index, "ndim", 0) > 0
