"""Inspects and resizes batches: nested tuples, lists, mappings and objects that hold tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

DEPTH = 6  # of nested containers


def rebuilt(thing: object, of: Callable[[Any], Any]) -> Any:
    """Return the same container with ``of`` applied to its contents; anything else unchanged."""
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
        return dataclasses.replace(
            thing,
            **{
                field.name: of(getattr(thing, field.name))
                for field in dataclasses.fields(thing)
                if field.init
            },
        )
    return thing


def tensors_of(thing: object, depth: int = 0) -> Iterator[Any]:
    if hasattr(thing, "untyped_storage"):
        yield thing
    elif depth < DEPTH:
        if isinstance(thing, Mapping):
            parts: Iterable[Any] = thing.values()
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            parts = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
        else:
            parts = thing if isinstance(thing, (list, tuple)) else ()
        for part in parts:
            yield from tensors_of(part, depth + 1)


def samples_in(batch: object, asked: int | None) -> int | None:
    """Return the number of samples in a batch; None if no tensor has a dimension.

    It is the number that the loader was asked for, if a tensor has a dimension of this size. Otherwise it is
    the most common first dimension: a last batch, or a data set smaller than a batch, has fewer samples than
    asked for.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch) if tensor.dim()]
    if asked is not None and any(asked in shape for shape in shapes):
        return asked
    return Counter(shape[0] for shape in shapes).most_common(1)[0][0] if shapes else None


def batch_dimension(shape: tuple[int, ...], samples: int) -> int | None:
    """Return the sample dimension: the first of size ``samples``, else the only dimension, else None."""
    if shape and shape[0] == samples:
        return 0
    found = [at for at, size in enumerate(shape) if size == samples]
    return found[0] if len(found) == 1 else None


def resized(batch: Any, samples: int, wanted: int, tensor_of: Callable[[Any, int | None], Any]) -> Any:
    """Return the batch with ``wanted`` samples instead of ``samples``.

    ``tensor_of(tensor, dimension)`` builds each new tensor; ``dimension`` is its sample dimension, or None. A
    list with one entry per sample gets ``wanted`` entries. Everything else belongs to the whole batch and
    stays.
    """

    def of(thing: Any) -> Any:
        if hasattr(thing, "untyped_storage"):
            return tensor_of(thing, batch_dimension(tuple(thing.shape), samples))
        if _one_a_sample(thing, samples):
            return type(thing)(of(thing[at % samples]) for at in range(wanted))
        return rebuilt(thing, of)

    return of(batch)


def rows(batch: Any, samples: int, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of a batch, as views of tensors and slices of per-sample lists."""

    def of(thing: Any) -> Any:
        if hasattr(thing, "untyped_storage"):
            dimension = batch_dimension(tuple(thing.shape), samples)
            return thing if dimension is None else thing.narrow(dimension, start, stop - start)
        if _one_a_sample(thing, samples):
            return type(thing)(thing[start:stop])
        return rebuilt(thing, of)

    return of(batch)


def _one_a_sample(thing: object, samples: int) -> bool:
    """Whether a list has one entry per sample, rather than tensors that hold all samples."""
    if not isinstance(thing, (list, tuple)) or len(thing) != samples or hasattr(thing, "_fields"):
        return False
    return all(batch_dimension(tuple(tensor.shape), samples) is None for tensor in tensors_of(thing))
