"""How the pipelines of a data set are split: what comes before samples are kept, before the batch takes over, and what is done to it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from flatout.pipeline.chain import Leaf, Place, Stop, Twin, aside, places
from flatout.pipeline.changes import Parameters
from flatout.pipeline.lowering import CONTAINERS, Lowered, copied, deterministic, flat, lower, name_of, same_pixels
from flatout.pipeline.operation import Unknown
from flatout.pipeline.store import values_of

PROBED = 3  # samples from all over the data set that a pipeline is read with


class InPlace(Unknown):
    """To look at a sample is to change it."""


@dataclass(frozen=True)
class Way:
    """A pipeline of the data set, its steps, and how many of them come before samples are kept, and before the batch takes over."""

    place: Place
    transform: Any
    steps: tuple[Any, ...]
    kept: int
    start: int
    lowered: Lowered | None
    parameters: Parameters  # of what was read, and of what kept samples came through


def ways_of(dataset: Any, lowering: bool, light: bool, keeping: bool) -> list[Way]:
    """Reads the pipelines as they are now. Raises Unknown with a sentence. Moves random generators."""
    found, ways = places(dataset), []
    for at, place in enumerate(found):
        transform, originals = place.transform, _entering(dataset, at, len(found))
        images = [copied(image) for image in originals]
        steps = tuple(flat(transform))
        lowered = lower(transform, images, light) if lowering else None
        start = lowered.start if lowered else len(steps)
        kept = deterministic(steps[:start], images) if keeping else start
        done = images
        for step in steps:
            done = [step(image) for image in done]
        if not all(map(same_pixels, originals, images)):
            raise InPlace("its transforms change the images of the data set in place")
        read = (*steps[:kept if keeping else 0], *steps[start:lowered.end if lowered else start])
        ways.append(Way(place, transform, steps, kept, start, lowered, Parameters(read, _containers(transform))))
    return ways


def _entering(dataset: Any, place: int, count: int) -> list[Any]:
    """A few images as they enter the pipeline of a place."""
    twin, length = Twin(aside(dataset), [Stop(at, (), None) for at in range(count)]), len(dataset)
    images: list[Any] = []
    for index in (*spread(length, PROBED), *range(0, length, max(1, length // 64))):  # a place may hold but a part of the data
        more, left = _images_of(twin.dataset, index, place)
        if any(leaf() is not None for leaf in left):
            raise Unknown("the data set keeps what its pipeline returns")
        images += more
        if len(images) >= PROBED:
            return images
    if not images:
        raise Unknown("the data set does something else with what its pipeline returns")
    return images


def spread(length: int, count: int) -> list[int]:
    """Indices from all over a data set, the first and the last among them."""
    return sorted({at * (length - 1) // max(1, count - 1) for at in range(count)}) if length else []


def leaves_of(sample: Any) -> list[Leaf]:
    return [value for value in values_of(sample) if isinstance(value, Leaf)]


def _images_of(dataset: Any, index: int, place: int) -> tuple[list[Any], list[weakref.ref[Leaf]]]:
    """What entered the pipeline of a place for one sample, and whether somebody keeps what came out of it."""
    leaves = leaves_of(dataset[index])
    return [copied(leaf.image) for leaf in leaves if leaf.place == place], [weakref.ref(leaf) for leaf in leaves]


def _containers(transform: Any) -> list[Any]:
    """What holds the steps of nested Compose and Sequential, each by itself."""
    if type(transform) is torch.nn.Sequential:
        return [vars(transform)["_modules"], *(found for inner in transform for found in _containers(inner))]
    if name_of(transform) in CONTAINERS:
        return [vars(transform), transform.transforms, *(found for inner in transform.transforms for found in _containers(inner))]
    return []
