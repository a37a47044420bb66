"""Batches of users' loaders: nested tuples, lists, mappings and dataclasses of tensors.

Count, split and move them.

A batch has ``B`` samples along the first dimension of its tensors. A list or tuple of ``B`` other values
(file names, captions) also has one per sample. Everything else belongs to the whole batch and goes into every
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.agent.batches import rebuilt, tensors_of
from flatout.schema.errors import LoopError


def size_of(batch: Any) -> int:
    """The number of samples: the length of the first tensor with a dimension.

    Raises LoopError if there is none.
    """
    if type(batch) in (list, tuple) and batch and hasattr(batch[0], "shape") and batch[0].shape:
        return int(batch[0].shape[0])
    for tensor in tensors_of(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    raise LoopError(
        f"a batch of the loader ({type(batch).__name__}) holds no tensor with a dimension, so its samples cannot be counted. "
        "Let the loader return tensors of shape (samples, ...)."
    )


def split(batch: object, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into parts of the given sizes, as views of its tensors.

    The sizes must add up to the batch's size.
    """
    total = sum(sizes)
    if len(sizes) == 1:
        return [batch]
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [part_of(batch, end - size, end, total) for size, end in zip(sizes, ends, strict=True)]


def part_of(batch: Any, start: int, end: int, total: int) -> Any:
    """Samples ``start`` to ``end`` of a batch of ``total``."""

    def of(thing: Any) -> Any:
        if hasattr(thing, "untyped_storage"):
            return thing[start:end] if thing.dim() and thing.shape[0] == total else thing
        if (
            isinstance(thing, (list, tuple))
            and len(thing) == total
            and total > 1
            and not any(True for _ in tensors_of(thing))
        ):
            return thing[start:end]
        return rebuilt(thing, of)

    return of(batch)


def moved(batch: object, device: Any) -> Any:
    """Move the batch to a device; copies from pinned memory are asynchronous."""

    def of(thing: Any) -> Any:
        if hasattr(thing, "untyped_storage"):
            return thing if thing.device == device else thing.to(device, non_blocking=True)
        return rebuilt(thing, of)

    return of(batch)
