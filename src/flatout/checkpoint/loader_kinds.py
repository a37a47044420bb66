"""How a DataLoader's position can be restored: what its samplers and data set offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Sampler

INDICES, STATEFUL, SEQUENCE, FETCHED = "indices", "state", "rows", "fetched"
# Samplers that draw when they start, not during iteration; `draws_while_iterating` knows the exceptions.
PLAIN_SAMPLERS = {
    "SequentialSampler",
    "RandomSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "BatchSampler",
    "DistributedSampler",
}


@contextmanager
def overridden(loader: DataLoader, overrides: dict[str, Any]) -> Iterator[None]:
    """Override attributes that a loader does not allow to set, while it makes an iterator."""
    attributes = vars(loader)
    before = {name: attributes[name] for name in overrides}
    attributes.update(overrides)
    try:
        yield
    finally:
        attributes.update(before)


def kind_of(torch: ModuleType, loader: DataLoader) -> str:
    """How to find a position in this loader again."""
    if type(loader) in (list, tuple):
        return SEQUENCE
    if has_state(loader):
        return STATEFUL
    loader_class = torch.utils.data.DataLoader
    if not isinstance(loader, loader_class) or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return FETCHED
    is_plain = (
        type(loader).__iter__ is loader_class.__iter__
        and type(loader)._get_iterator is loader_class._get_iterator
    )
    return INDICES if is_plain else FETCHED  # a subclass may iterate differently


def samplers_of(loader: DataLoader) -> list[Any]:
    samplers: list[Any] = []
    queue = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while queue:
        sampler = queue.pop(0)
        if sampler is not None and not any(sampler is known for known in samplers):
            samplers.append(sampler)
            queue.append(getattr(sampler, "sampler", None))
    return samplers


def stateful_objects(loader: DataLoader, kind: str) -> list[Any]:
    """Objects that may hold a position: samplers, the data set, a custom loader."""
    if kind == SEQUENCE:
        return []
    things = (
        [*samplers_of(loader), getattr(loader, "dataset", None)] if hasattr(loader, "dataset") else [loader]
    )
    return [thing for thing in things if hasattr(thing, "__dict__")]


def has_state(thing: object) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def draws_while_iterating(sampler: Sampler) -> bool:
    """Whether a sampler may draw between two batches from a generator that other code uses, too."""
    kind = type(sampler)
    if kind in (list, tuple, range):
        return False
    if not kind.__module__.startswith("torch.utils.data.") or kind.__name__ not in PLAIN_SAMPLERS:
        return True
    if kind.__name__ != "RandomSampler" or sampler.generator is None:
        return False
    return bool(sampler.replacement or sampler.num_samples > len(sampler.data_source))


def length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # raised by user code
        return None
