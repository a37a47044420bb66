"""Batches as loaders hand them out: nested tuples, lists, mappings and objects that hold tensors; how many samples, and the same batch with more or fewer."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

DEPTH = 6  # of containers in containers


def rebuilt(thing: Any, of: Callable[[Any], Any]) -> Any:
    """The same container with ``of`` applied to what it holds; anything else as it is."""
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(of(value) for value in thing))
    if isinstance(thing, (list, tuple)):
        return type(thing)(of(value) for value in thing)
    if isinstance(thing, Mapping):
        other: Any = copy.copy(thing)
        for key in thing:
            other[key] = of(thing[key])
        return other
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return dataclasses.replace(thing, **{field.name: of(getattr(thing, field.name)) for field in dataclasses.fields(thing) if field.init})
    return thing


def tensors_of(thing: Any, depth: int = 0) -> Iterator[Any]:
    if hasattr(thing, "untyped_storage"):
        yield thing
    elif depth < DEPTH:
        if isinstance(thing, Mapping):
            parts: Any = thing.values()
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            parts = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
        else:
            parts = thing if isinstance(thing, (list, tuple)) else ()
        for part in parts:
            yield from tensors_of(part, depth + 1)


def samples_in(batch: Any, asked: int | None) -> int | None:
    """How many samples a batch has: as many as the loader was asked for, where a tensor has that many along a dimension; else the commonest first dimension.

    A last batch, or a data set that is smaller than its batch, has fewer than asked for. None where no tensor has a dimension.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch) if tensor.dim()]
    if asked is not None and any(asked in shape for shape in shapes):
        return asked
    return Counter(shape[0] for shape in shapes).most_common(1)[0][0] if shapes else None


def batch_dimension(shape: tuple[int, ...], samples: int) -> int | None:
    """The dimension along which a tensor has its samples: the first one where it has as many, else the only one; None where it is not to be told."""
    if shape and shape[0] == samples:
        return 0
    found = [at for at, size in enumerate(shape) if size == samples]
    return found[0] if len(found) == 1 else None


def resized(batch: Any, samples: int, wanted: int, tensor_of: Callable[[Any, int | None], Any]) -> Any:
    """The batch with ``wanted`` samples in the place of ``samples``.

    ``tensor_of(tensor, dimension)`` makes each tensor anew, with the dimension that holds its samples, None where it has none. A list with one thing
    a sample gets as many; everything else belongs to the whole batch and stays.
    """

    def of(thing: Any) -> Any:
        if hasattr(thing, "untyped_storage"):
            return tensor_of(thing, batch_dimension(tuple(thing.shape), samples))
        if _one_a_sample(thing, samples):
            return type(thing)(of(thing[at % samples]) for at in range(wanted))
        return rebuilt(thing, of)

    return of(batch)


def rows(batch: Any, samples: int, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of a batch of ``samples``: views of its tensors, and parts of its lists with one thing a sample."""

    def of(thing: Any) -> Any:
        if hasattr(thing, "untyped_storage"):
            dimension = batch_dimension(tuple(thing.shape), samples)
            return thing if dimension is None else thing.narrow(dimension, start, stop - start)
        if _one_a_sample(thing, samples):
            return type(thing)(thing[start:stop])
        return rebuilt(thing, of)

    return of(batch)


def _one_a_sample(thing: Any, samples: int) -> bool:
    """Whether a list has one thing for each sample, and not tensors that have all of them."""
    if not isinstance(thing, (list, tuple)) or len(thing) != samples or hasattr(thing, "_fields"):
        return False
    return all(batch_dimension(tuple(tensor.shape), samples) is None for tensor in tensors_of(thing))
