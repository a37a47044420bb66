"""Transforms that apply to some images, one of several, or several in a random order for each image.

Images that take the same branch are gathered, transformed together, and put back. So every branch must keep
the shape and form of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from flatout.data.draws import Draw, Numbers, Uniform
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable, Reader

Way = tuple[BatchOperation, ...]


def _along(way: Way, shape: ImageShape) -> list[tuple[BatchOperation, ImageShape]]:
    """Return each operation with its input shape. Raises NotBatchable if the branch changes the shape."""
    met, at = [], shape
    for operation in way:
        met.append((operation, at))
        at = operation.shape(at)
    if at != shape:
        raise NotBatchable(f"some images would be {tuple(at)} and others {tuple(shape)}")
    return met


def _drawn_along(way: Way, shape: ImageShape, words: Numbers) -> tuple[Any, ...]:
    return tuple(operation.drawn(met, words) for operation, met in _along(way, shape))


def _put_through(
    way: Way, images: Tensor, rows: list[int], numbers: Sequence[tuple[Any, ...]], done: Tensor
) -> None:
    """Apply the branch to ``images[rows]`` with these numbers, and write the result into ``done``."""
    if not rows:
        return
    part = images[rows]
    for at, (operation, met) in enumerate(_along(way, ImageShape(*images.shape[1:]))):
        part = operation(part, operation.together(met, [each[at] for each in numbers]))
    done[rows] = part


def single(number: float) -> float:
    """Round to single precision.

    ``torch.rand(1) < number`` compares in single precision, ``torch.rand(1).item() < number`` in double.
    """
    return c_float(number).value


@dataclass(frozen=True)
class RandomBranch(BatchOperation):
    """Apply the branch if a random number in [0, 1) is below ``p`` (or equal, if ``inclusive``)."""

    way: Way
    p: float
    inclusive: bool = False
    apart: float = 0.0

    @property
    def heavy(self) -> bool:  # type: ignore[override]
        return any(operation.heavy for operation in self.way)

    def shape(self, shape: ImageShape) -> ImageShape:
        _along(self.way, shape)
        return shape

    def draws(self, shape: ImageShape) -> tuple[Draw, ...] | None:
        settled = all(operation.draws(met) == () for operation, met in _along(self.way, shape))
        return (Uniform(),) if settled else None

    def row(self, shape: ImageShape, words: Numbers) -> tuple[Any, ...] | None:
        number = words.rand()
        return (
            _drawn_along(self.way, shape, words)
            if number < self.p or (self.inclusive and number == self.p)
            else None
        )

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        if self.draws(ImageShape(*images.shape[1:])) is None:
            found = [(row, number) for row, number in enumerate(numbers) if number is not None]
        else:
            number = numbers[0].double()
            taken = number <= self.p if self.inclusive else number < self.p
            found = [(row, ((),) * len(self.way)) for row in taken.nonzero().squeeze(1).tolist()]
        done = images.clone()
        _put_through(self.way, images, [row for row, _ in found], [number for _, number in found], done)
        return done


class BranchChoice(BatchOperation):
    """Several branches for an image; the choice and the order are drawn for each image."""

    ways: tuple[Way, ...]

    @property
    def heavy(self) -> bool:  # type: ignore[override]
        return any(operation.heavy for operation in chain(*self.ways))

    def shape(self, shape: ImageShape) -> ImageShape:
        for way in self.ways:
            _along(way, shape)
        return shape

    def draws(self, shape: ImageShape) -> None:
        return None


@dataclass(frozen=True)
class OneOf(BranchChoice):
    """One of these branches, by weights that sum to 1."""

    ways: tuple[Way, ...]
    weights: tuple[float, ...]
    apart: float = 0.0

    def row(self, shape: ImageShape, words: Numbers) -> tuple[int, tuple[Any, ...]]:
        chosen = int(torch.multinomial(torch.tensor(self.weights), 1, generator=words.torch()))
        return chosen, _drawn_along(self.ways[chosen], shape, words)

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        done = images.clone()
        for at, way in enumerate(self.ways):
            rows = [row for row, (chosen, _) in enumerate(numbers) if chosen == at]
            _put_through(way, images, rows, [numbers[row][1] for row in rows], done)
        return done


@dataclass(frozen=True)
class AnyOrder(BranchChoice):
    """All of these branches, in a random order for each image."""

    ways: tuple[Way, ...]
    apart: float = 0.0

    def row(self, shape: ImageShape, words: Numbers) -> list[tuple[int, tuple[Any, ...]]]:
        return [(at, _drawn_along(self.ways[at], shape, words)) for at in words.randperm(len(self.ways))]

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        done = images.clone()
        for now in range(len(self.ways)):
            for at, way in enumerate(self.ways):
                rows = [row for row, steps in enumerate(numbers) if steps[now][0] == at]
                _put_through(way, done, rows, [numbers[row][now][1] for row in rows], done)
        return done


def readers(read: Reader) -> dict[str, Reader]:
    """Return the readers of containers. ``read`` reads their contents."""

    def way_of(transforms: Sequence[Any], form: ImageForm) -> Way:
        found: list[BatchOperation] = []
        at = form
        for transform in transforms:
            what = read(transform, at)
            operations = (what,) if isinstance(what, BatchOperation) else tuple(what)
            for operation in operations:
                at = operation.form(at)
            found += operations
        if at != form:
            raise NotBatchable(f"some images would become {at} and others {form}")
        return tuple(found)

    def apart(*ways: Way) -> float:
        return sum(operation.apart for way in ways for operation in way)

    def apply_v1(transform: Module, form: ImageForm) -> BatchOperation:
        way = way_of(transform.transforms, form)
        return RandomBranch(
            way, single(transform.p), inclusive=True, apart=apart(way)
        )  # `if self.p < torch.rand(1): return img`

    def apply_v2(transform: Module, form: ImageForm) -> BatchOperation:
        way = way_of(transform.transforms, form)
        return RandomBranch(way, single(transform.p), apart=apart(way))

    def choice(transform: Module, form: ImageForm) -> BatchOperation:
        ways = tuple(way_of([each], form) for each in transform.transforms)
        return OneOf(ways, tuple(transform.p), apart(*ways))

    def order(transform: Module, form: ImageForm) -> BatchOperation:
        ways = tuple(way_of([each], form) for each in transform.transforms)
        return AnyOrder(ways, apart(*ways))

    def python_random(transform: object, form: ImageForm) -> BatchOperation:
        raise NotBatchable(
            f"{type(transform).__name__} (v1) draws from Python's random, not from torch's generator"
        )

    return {
        "v1.RandomApply": apply_v1,
        "v2.RandomApply": apply_v2,
        "v2.RandomChoice": choice,
        "v2.RandomOrder": order,
        "v1.RandomChoice": python_random,
        "v1.RandomOrder": python_random,
    }
