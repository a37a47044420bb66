"""The random generators of a process: torch's on the CPU, numpy's and Python's, put aside and put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def states() -> tuple[Any, Any, Any]:
    numpy: Any = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def put_back(kept: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    if kept[2] is not None:
        sys.modules["numpy"].random.set_state(kept[2])


def same_states(a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> bool:
    if not torch.equal(a[0], b[0]) or a[1] != b[1] or (a[2] is None) != (b[2] is None):
        return False
    return a[2] is None or (a[2][2:] == b[2][2:] and bool((a[2][1] == b[2][1]).all()))


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is drawn inside, the program's random numbers go on as if nothing had been."""
    kept = states()
    try:
        yield
    finally:
        put_back(kept)


class WorkerStreams:
    """The generators that loader workers would have in one epoch: worker k draws batches k, k + n, k + 2 n, ...

    Worker k seeds torch and ``random`` with the epoch's base seed plus k, and numpy with what torch's own worker makes of the two
    (torch/utils/data/_utils/worker.py). Used by fewer workers, or by none, each of which makes every batch of the streams it has.
    """

    def __init__(self, workers: int, base_seed: int) -> None:
        self.workers = workers
        self._batch: int | None = None
        with untouched():
            self._states = [_seeded(base_seed, worker) for worker in range(workers)]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """For the next batch the process draws from the generators of the worker whose turn it is."""
        here = torch.utils.data.get_worker_info()
        if self._batch is None:
            self._batch = here.id if here is not None else 0
        own, worker = states(), self._batch % self.workers
        put_back(self._states[worker])
        try:
            yield
        finally:
            self._states[worker] = states()
            put_back(own)
            self._batch += here.num_workers if here is not None else 1


def can_stand_in(workers: int, asked: int) -> bool:
    """Whether so many workers can draw what those asked for would draw: each then has whole streams of random numbers."""
    return workers < asked and (workers == 0 or asked % workers == 0)


def seeds_itself(loader: Any) -> bool:
    """Whether what the workers of this DataLoader draw cannot be drawn for them."""
    return bool(loader.worker_init_fn is not None or loader.persistent_workers)


def has_own_order(sampler: Any, batch_sampler: Any) -> bool:
    """Whether an order of samples comes from the script's own code: it may depend on what was trained meanwhile."""
    plain = (type(None), list, tuple, range)
    return any(type(each) not in plain and not type(each).__module__.startswith("torch.utils.data.") for each in (sampler, batch_sampler))


def without_workers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a DataLoader, with nothing left that only workers understand."""
    only_for_workers = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context")
    return {**{name: value for name, value in arguments.items() if name not in only_for_workers}, "num_workers": 0}


def _seeded(base_seed: int, worker: int) -> tuple[Any, Any, Any]:
    from torch.utils.data._utils.worker import _generate_state

    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_generate_state(base_seed, worker))
    return states()
