"""Properties of a DataLoader: its arguments, whether its data is random, whether two were made alike."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

HUGE = 2**40  # limit: endless samplers report a huge length


def draws_random_numbers(dataset: Dataset, torch: ModuleType) -> bool:
    """Whether fetching a sample draws random numbers or gives another result when repeated.

    Fetches two samples twice, and restores the generators.
    """
    numpy = sys.modules.get("numpy")
    before: Any = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        for index in (0, 1):
            # e.g. a generator of its own, copied into each worker
            if not _alike(dataset[index], dataset[index]):
                return True
        moved = not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
        if numpy is not None:
            now = numpy.random.get_state()
            moved = moved or now[2] != before[2][2] or not (now[1] == before[2][1]).all()
        return bool(moved)
    except Exception:
        return True  # unknown counts as random
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])


def _alike(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if hasattr(a, "shape") and hasattr(a, "tolist"):  # tensors and arrays
        return a is b or repr(a.tolist()) == repr(b.tolist())
    return a is b or hasattr(a, "getbands") or type(a).__eq__ is object.__eq__ or bool(a == b)  # type: ignore[comparison-overlap]


def arguments_of(loader: DataLoader, torch: ModuleType) -> dict[str, Any]:
    """Return the arguments to rebuild this DataLoader, without the samplers that it made for itself."""
    data = torch.utils.data
    asked: dict[str, Any] = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) is not data.BatchSampler and batches is not None:
        asked["batch_sampler"] = batches
    else:
        asked["batch_size"], asked["drop_last"] = loader.batch_size, loader.drop_last
        own_shuffle = (
            type(sampler) is data.RandomSampler and not sampler.replacement and sampler._num_samples is None
        )
        if own_shuffle and sampler.generator is loader.generator:
            asked["shuffle"] = True
        elif type(sampler) is not data.SequentialSampler and is_map_style(loader.dataset):
            asked["sampler"] = sampler
    defaults = {
        "num_workers": 0,
        "pin_memory": False,
        "timeout": 0,
        "worker_init_fn": None,
        "generator": None,
        "persistent_workers": False,
        "pin_memory_device": "",
        "in_order": True,
        "multiprocessing_context": None,
    }
    asked.update(
        {
            name: value
            for name, default in defaults.items()
            if (value := getattr(loader, name, default)) != default
        }
    )
    if loader.num_workers and loader.prefetch_factor is not None:
        asked["prefetch_factor"] = loader.prefetch_factor
    return asked


def way_of(dataset: Dataset, asked: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key of loaders that the script treats as one, e.g. a new one for each epoch."""
    try:
        length = len(dataset)
    except Exception:
        length = None
    plain = [
        asked.get(name, default)
        for name, default in (("batch_size", 1), ("shuffle", None), ("drop_last", False), ("num_workers", 0))
    ]
    return (type(dataset), length, *plain, type(asked.get("sampler")), type(asked.get("batch_sampler")))


def weakly(thing: object) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # e.g. a list: hold it strongly
        return lambda: thing


def describe(loader: DataLoader, dataset: Dataset, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        length: int | None = len(dataset)
    except Exception:
        length = None
    return {
        "dataset": type(dataset).__name__,
        "length": length if length is None or length < HUGE else None,
        "batch_size": loader.batch_size
        if loader.batch_size is not None
        else getattr(loader.batch_sampler, "batch_size", None),
        "num_workers": loader.num_workers,
        "asked_workers": asked.get("num_workers", 0),
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "prefetch_factor": loader.prefetch_factor,
        "iterable": not is_map_style(dataset),
    }


def is_map_style(dataset: Dataset) -> bool:
    """Whether samples are fetched by index; an IterableDataset inherits a raising ``__getitem__``."""
    return hasattr(dataset, "__getitem__") and not any(
        kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__
    )
