"""Batches of users' loaders: nested tuples, lists, mappings and dataclasses of tensors.

Count, split and move them, and group them into effective batches.

A batch has ``B`` samples along the first dimension of its tensors. A list or tuple of ``B`` other values
(file names, captions) also has one per sample. Everything else belongs to the whole batch and goes into every
part.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flatout.measure.nests import mapped, tensors_in
from flatout.schema.errors import LoopError


def size_of(batch: Any) -> int:
    """The number of samples: the length of the first tensor with a dimension.

    Raises LoopError if there is none."""
    if type(batch) in (list, tuple) and batch and hasattr(batch[0], "shape") and batch[0].shape:
        return int(batch[0].shape[0])
    for tensor in tensors_in(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    raise LoopError(
        f"a batch of the loader ({type(batch).__name__}) holds no tensor with a dimension, so its samples cannot be counted. "
        "Let the loader return tensors of shape (samples, ...)."
    )


def split(batch: object, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into parts of the given sizes, as views of its tensors.

    The sizes must add up to the batch's size."""
    total = sum(sizes)
    if len(sizes) == 1:
        return [batch]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [part_of(batch, end - size, end, total) for size, end in zip(sizes, ends, strict=True)]


def part_of(batch: Any, start: int, end: int, total: int) -> Any:
    """Samples ``start`` to ``end`` of a batch of ``total``."""

    def per_sample(part: Any) -> bool:
        is_row = isinstance(part, (list, tuple)) and len(part) == total and total > 1
        return is_row and not any(True for _ in tensors_in(part))

    def slice_leaf(leaf: Any) -> Any:
        if hasattr(leaf, "untyped_storage"):
            return leaf[start:end] if leaf.dim() and leaf.shape[0] == total else leaf
        return leaf[start:end] if per_sample(leaf) else leaf

    return mapped(batch, slice_leaf, per_sample)


def move(batch: object, device: Any) -> Any:
    """Move the batch to a device; copies from pinned memory are asynchronous."""

    def move_leaf(leaf: Any) -> Any:
        if not hasattr(leaf, "untyped_storage") or leaf.device == device:
            return leaf
        return leaf.to(device, non_blocking=True)

    return mapped(batch, move_leaf)


def windows(batches: Iterable[Any], effective: int | None) -> Iterator[list[tuple[Any, int]]]:
    """Yields lists of (batch, samples), one list per optimizer step.

    Without ``effective``, each batch is alone.

    The last window of an epoch may be shorter. Raises LoopError if the loader's batches do not add up to the
    effective batch."""
    window: list[tuple[Any, int]] = []
    filled = 0
    for batch in batches:
        size = size_of(batch)
        if effective is None:
            yield [(batch, size)]
            continue
        if filled + size > effective:
            loader_batch = window[0][1] if window else size
            fitting = effective // loader_batch
            choices = sorted({(fitting or 1) * loader_batch, (fitting + 1) * loader_batch})
            raise LoopError(
                f"effective_batch={effective} is not a multiple of the loader's batches of {loader_batch} samples. "
                f"Use {' or '.join(map(str, choices))}, or change the loader's batch_size."
            )
        window.append((batch, size))
        filled += size
        if filled == effective:
            yield window
            window, filled = [], 0
    if window:
        yield window


def even_sizes(size: int, micro_batch: int | None) -> list[int]:
    """The sizes of the micro-batches of a batch, as even as possible.

    10 samples in parts of at most 4 give 4, 3, 3."""
    if micro_batch is None or size <= micro_batch:
        return [size]
    parts = -(-size // micro_batch)
    quotient, remainder = divmod(size, parts)
    return [quotient + 1] * remainder + [quotient] * (parts - remainder)
