"""How a DataLoader's position can be restored: what its samplers and data set offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Sampler

INDICES, STATEFUL, ROWS, FETCHED = "indices", "state", "rows", "fetched"
# Samplers that draw when they start, not during iteration; `draws_as_it_goes` knows the exceptions.
PLAIN_SAMPLERS = {
    "SequentialSampler",
    "RandomSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "BatchSampler",
    "DistributedSampler",
}


@contextmanager
def in_place(loader: DataLoader, instead: dict[str, Any]) -> Iterator[None]:
    """Override attributes that a loader does not allow to set, while it makes an iterator."""
    own = vars(loader)
    before = {name: own[name] for name in instead}
    own.update(instead)
    try:
        yield
    finally:
        own.update(before)


def kind_of(torch: ModuleType, loader: DataLoader) -> str:
    """How to find a position in this loader again."""
    if type(loader) in (list, tuple):
        return ROWS
    if has_state(loader):
        return STATEFUL
    made = torch.utils.data.DataLoader
    if not isinstance(loader, made) or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return FETCHED
    own = type(loader).__iter__ is made.__iter__ and type(loader)._get_iterator is made._get_iterator
    return INDICES if own else FETCHED  # a subclass may iterate differently


def samplers_of(loader: DataLoader) -> list[Any]:
    samplers: list[Any] = []
    waiting = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and not any(sampler is known for known in samplers):
            samplers.append(sampler)
            waiting.append(getattr(sampler, "sampler", None))
    return samplers


def things_of(loader: DataLoader, kind: str) -> list[Any]:
    """Objects that may hold a position: samplers, the data set, a custom loader."""
    if kind == ROWS:
        return []
    things = (
        [*samplers_of(loader), getattr(loader, "dataset", None)] if hasattr(loader, "dataset") else [loader]
    )
    return [thing for thing in things if hasattr(thing, "__dict__")]


def has_state(thing: object) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def draws_as_it_goes(sampler: Sampler) -> bool:
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
