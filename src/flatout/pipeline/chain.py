"""The pipelines of a data set, and a twin of it that stops before a step of them.

A data set holds its pipeline in an attribute (torchvision's own, and nearly everybody's); Subset, ConcatDataset and wrappers hold
another data set. The twin shares everything with the original but the attributes on the way to the pipeline, so the script's own
object stays untouched. What the data set's code or the script changes meanwhile is carried over before and after each batch.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from flatout.pipeline.draws import Numbers
from flatout.pipeline.lowering import CONTAINERS, READERS, Lowered, flat, name_of, shape_of
from flatout.pipeline.operation import Unknown

NOT_IMAGES = ("target_transform",)
DEEPEST = 8


class Leaf:
    """Stands in a sample for an image on which work is left to do. Anything but handing it on fails."""

    __slots__ = ("__weakref__", "image", "numbers", "place")

    def __init__(self, image: Any, place: int, numbers: list[Any] | None = None) -> None:
        self.image = image
        self.place = place
        self.numbers = numbers


class Stop:
    """The first steps of a pipeline; then the image is put aside, with its random numbers where they must be drawn at once."""

    def __init__(self, place: int, steps: Sequence[Any], lowered: Lowered | None) -> None:
        self.place = place
        self.steps = steps
        self.lowered = lowered

    def __call__(self, image: Any) -> Leaf:
        for step in self.steps:
            image = step(image)
        if self.lowered is None:
            return Leaf(image, self.place)
        return Leaf(image, self.place, self.lowered.row(shape_of(image), Numbers()))


class Place:
    """Where a pipeline was found: the object that holds it, and under which name."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name

    @property
    def transform(self) -> Any:
        return vars(self.owner)[self.name]


def places(dataset: Any) -> list[Place]:
    """The pipelines that samples of this data set come through, the outermost of each way. Raises Unknown with a sentence."""
    return [Place(way[-1][0], way[-1][1]) for way in _ways(dataset)]


def _ways(dataset: Any, depth: int = 0) -> list[list[tuple[Any, str, int | None]]]:
    """To each pipeline the way there: object, attribute, index in it."""
    kind = type(dataset)
    if depth > DEEPEST or not hasattr(dataset, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__[:-1] if base.__module__ != "typing"):
        raise Unknown(f"a data set of type {kind.__name__} holds no pipeline that could be found")
    if hasattr(kind, "__getitems__") and kind.__getitems__ is not Subset.__getitems__:
        raise Unknown(f"{kind.__name__} fetches whole batches by itself")
    if isinstance(dataset, ConcatDataset):
        return [[(dataset, "datasets", at), *way] for at, inner in enumerate(dataset.datasets) for way in _ways(inner, depth + 1)]
    held = vars(dataset)
    pipelines = {id(value): name for name, value in reversed(held.items()) if name not in NOT_IMAGES and _is_pipeline(value)}
    if len(pipelines) > 1:
        raise Unknown(f"{kind.__name__} holds several pipelines of transforms")
    if pipelines:
        return [[(dataset, name, None)] for name in pipelines.values()]
    inner_sets = [(name, value) for name, value in held.items() if isinstance(value, Dataset)]
    if len(inner_sets) != 1:
        raise Unknown(f"{kind.__name__} holds no pipeline of torchvision's transforms")
    name, inner = inner_sets[0]
    return [[(dataset, name, None), *way] for way in _ways(inner, depth + 1)]


def aside(dataset: Any, depth: int = 0) -> Any:
    """A copy to look at: what its code does to its attributes, and puts into its lists and dictionaries, does not happen to the original.

    Data itself is shared. What cannot be copied so is answered as it is.
    """
    kind = type(dataset)
    if kind in (list, tuple) or depth > DEEPEST or not hasattr(dataset, "__dict__"):
        return dataset
    copy = object.__new__(kind)
    for name, value in vars(dataset).items():
        if isinstance(value, Dataset):
            value = aside(value, depth + 1)
        elif isinstance(dataset, ConcatDataset) and name == "datasets":
            value = [aside(inner, depth + 1) for inner in value]
        elif type(value) in (list, dict, set, OrderedDict):
            value = value.copy()
        elif type(value) is defaultdict:
            value = defaultdict(value.default_factory, value)
        vars(copy)[name] = value
    for name in [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if isinstance(getattr(base, "__slots__", ()), tuple)]:
        if name not in ("__dict__", "__weakref__"):
            raise Unknown(f"a data set of type {kind.__name__} has slots, and cannot be looked at aside")
    return copy


def _is_pipeline(value: Any) -> bool:
    if type(value) is torch.nn.Sequential:
        return any(map(name_of, flat(value)))
    return name_of(value) in CONTAINERS or name_of(value) in READERS


class Changed(Exception):
    """The script has given the data set another pipeline."""


class Twin:
    """A data set that shares everything with the original, but for what ``stops`` replace: one for each place, None to leave it."""

    def __init__(self, dataset: Any, stops: Sequence[Stop | None]) -> None:
        self._pairs: list[tuple[Any, Any, dict[str, Any], frozenset[str]]] = []
        self.dataset = self._copy(dataset, list(zip(_ways(dataset), stops, strict=True)))

    def _copy(self, original: Any, ways: list[tuple[list[tuple[Any, str, int | None]], Stop | None]]) -> Any:
        copy = object.__new__(type(original))
        vars(copy).update(vars(original))
        own = set()
        for name in dict.fromkeys(way[0][1] for way, _ in ways):
            inner = [(way, stop) for way, stop in ways if way[0][1] == name]
            value = vars(original)[name]
            if len(inner[0][0]) == 1:
                stop = inner[0][1]
                if stop is not None:
                    own |= _replace(copy, name, value, stop)
            elif isinstance(original, ConcatDataset):
                at = dict.fromkeys(way[0][2] for way, _ in inner)
                parts = {i: self._copy(value[i], [(way[1:], stop) for way, stop in inner if way[0][2] == i]) for i in at}
                vars(copy)[name] = [parts.get(i, part) for i, part in enumerate(value)]
                own.add(name)
            else:
                vars(copy)[name] = self._copy(value, [(way[1:], stop) for way, stop in inner])
                own.add(name)
        self._pairs.append((original, copy, dict(vars(original)), frozenset(own)))
        return copy

    def carry_over(self) -> bool:
        """What was changed since the last time, by the script in the original or by the data set's own code in the twin, is so in both.

        Whether the script has changed anything. Raises Changed where it has changed the way to the pipeline.
        """
        by_script = False
        for original, copy, known, own in self._pairs:
            theirs, ours = vars(original), vars(copy)
            if theirs.keys() == known.keys() and all(theirs[name] is value and (name in own or ours.get(name) is value) for name, value in known.items()):
                continue
            for name in own:
                if theirs.get(name) is not known.get(name):
                    raise Changed("the script gives the data set another pipeline while batches are made")
            for name in {*theirs, *ours} - own:
                if name not in theirs and name in known:
                    ours.pop(name, None)
                    by_script = True
                elif name in theirs and theirs[name] is not known.get(name, known):
                    ours[name] = theirs[name]
                    by_script = True
                elif name in ours:
                    theirs[name] = ours[name]
            known.clear()
            known.update(theirs)
        return by_script


def _replace(copy: Any, name: str, transform: Any, stop: Stop) -> set[str]:
    """Put the stop in the pipeline's place, and into the pair of image and target transforms that torchvision's data sets keep beside it."""
    vars(copy)[name] = stop
    own = {name}
    for other, value in list(vars(copy).items()):
        if type(value).__name__ == "StandardTransform" and getattr(value, "transform", None) is transform:
            pair = object.__new__(type(value))
            vars(pair).update(vars(value), transform=stop)
            vars(copy)[other] = pair
            own.add(other)
        elif value is transform:
            vars(copy)[other] = stop
            own.add(other)
    return own
