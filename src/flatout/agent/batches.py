"""Inspects and resizes batches: nested tuples, lists, mappings and objects that hold tensors."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from flatout.measure.nests import mapped, tensors_in


def samples_in(batch: object, batch_size: int | None = None) -> int | None:
    """Return the number of samples in a batch; None if no tensor has a dimension.

    It is the number that the loader was asked for, if a tensor has a dimension of this size. Otherwise it is
    the most common first dimension: a last batch, or a data set smaller than a batch, has fewer samples than
    asked for.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_in(batch) if tensor.dim()]
    if batch_size is not None and any(batch_size in shape for shape in shapes):
        return batch_size
    return Counter(shape[0] for shape in shapes).most_common(1)[0][0] if shapes else None


def batch_dimension(shape: tuple[int, ...], samples: int) -> int | None:
    """Return the sample dimension: the first of size ``samples``, else the only dimension, else None."""
    if shape and shape[0] == samples:
        return 0
    matches = [i for i, size in enumerate(shape) if size == samples]
    return matches[0] if len(matches) == 1 else None


def resized(batch: Any, samples: int, wanted: int, tensor_of: Callable[[Any, int | None], Any]) -> Any:
    """Return the batch with ``wanted`` samples instead of ``samples``.

    ``tensor_of(tensor, dimension)`` builds each new tensor; ``dimension`` is its sample dimension, or None. A
    list with one entry per sample gets ``wanted`` entries. Everything else belongs to the whole batch and
    stays.
    """

    def resize(leaf: Any) -> Any:
        if hasattr(leaf, "untyped_storage"):
            return tensor_of(leaf, batch_dimension(tuple(leaf.shape), samples))
        if per_sample(leaf):
            return type(leaf)(mapped(leaf[i % samples], resize, per_sample) for i in range(wanted))
        return leaf

    per_sample = partial(_is_per_sample, samples=samples)
    return mapped(batch, resize, per_sample)


def rows(batch: Any, samples: int, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of a batch, as views of tensors and slices of per-sample lists."""

    def cut(leaf: Any) -> Any:
        if hasattr(leaf, "untyped_storage"):
            dimension = batch_dimension(tuple(leaf.shape), samples)
            return leaf if dimension is None else leaf.narrow(dimension, start, stop - start)
        return type(leaf)(leaf[start:stop]) if per_sample(leaf) else leaf

    per_sample = partial(_is_per_sample, samples=samples)
    return mapped(batch, cut, per_sample)


def _is_per_sample(thing: object, samples: int) -> bool:
    if not isinstance(thing, (list, tuple)) or len(thing) != samples or hasattr(thing, "_fields"):
        return False
    return all(batch_dimension(tuple(tensor.shape), samples) is None for tensor in tensors_in(thing))
