"""Saves and restores the random generators of samples: torch's (CPU), numpy's, Python's, the data set's."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Generator
from torch.utils.data import DataLoader, Dataset, Sampler

MAX_DEPTH = 6
LIBRARIES = ("builtins", "torch", "torchvision", "numpy", "PIL", "typing")
MAX_ENTRIES = 64  # entries of longer lists are data
MAX_OBJECTS = 4096  # most objects inspected
States = tuple[Any, Any, Any, list[tuple[Any, Any]]]  # of torch, random, numpy, the data set


def states(rngs: Sequence[Any] = ()) -> States:
    """The states of the process's generators and of a data set's `own_generators`."""
    numpy = sys.modules.get("numpy")
    saved = [(generator, _state_of(generator)) for generator in rngs]
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None, saved


def restore_states(saved: States) -> None:
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy"].random.set_state(saved[2])
    for generator, state in saved[3]:
        _set_state_of(generator, state)


def same_states(a: States, b: States) -> bool:
    if not torch.equal(a[0], b[0]) or a[1] != b[1] or (a[2] is None) != (b[2] is None):
        return False
    return (a[2] is None or _same(a[2], b[2])) and _same(
        [state for _, state in a[3]], [state for _, state in b[3]]
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


@contextmanager
def preserve_states(rngs: Sequence[Any] = ()) -> Iterator[None]:
    """Restore the random generators on exit, so that draws inside do not affect the program."""
    saved = states(rngs)
    try:
        yield
    finally:
        restore_states(saved)


def own_generators(thing: object) -> list[Any]:
    """The generators held by a data set or its transforms, or named by their code in its module."""
    rngs: dict[int, Any] = {}
    seen: set[int] = set()

    def visit(value: object, depth: int) -> None:
        if id(value) in seen or depth > MAX_DEPTH or len(seen) > MAX_OBJECTS:
            return
        seen.add(id(value))
        if _is_generator(value):
            rngs[id(value)] = value
        elif isinstance(value, FunctionType):
            visit_code(value, depth)
        elif isinstance(value, (list, tuple, set)):
            for part in list(value)[:MAX_ENTRIES]:
                visit(part, depth + 1)
        elif isinstance(value, dict):
            for part in list(value.values())[:MAX_ENTRIES]:
                visit(part, depth + 1)
        elif hasattr(value, "__func__"):
            visit(value.__func__, depth)
            visit(getattr(value, "__self__", None), depth + 1)  # an unbound classmethod has none
        elif (
            hasattr(value, "__dict__")
            and not isinstance(value, (type, torch.Tensor))
            and type(value).__module__ != "builtins"
        ):
            for part in list(vars(value).values()):
                visit(part, depth + 1)
            for kind in type(value).__mro__:
                if kind.__module__.split(".")[0] not in LIBRARIES:
                    for part in list(vars(kind).values()):
                        visit(getattr(part, "fget", None) or getattr(part, "__func__", part), depth + 1)

    def visit_code(function: Callable[..., Any], depth: int) -> None:
        for cell in function.__closure__ or ():
            try:
                visit(cell.cell_contents, depth + 1)
            except ValueError:  # not filled yet
                pass
        for name in function.__code__.co_names:
            part = function.__globals__.get(name)
            if _is_generator(part) or isinstance(part, FunctionType):
                visit(part, depth + 1)

    visit(thing, 0)
    return list(rngs.values())


def _is_generator(value: object) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return getattr(value, "device", torch.device("cpu")).type == "cpu" and not isinstance(
            value, random.SystemRandom
        )
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class WorkerStreams:
    """The generators of loader workers in one epoch: worker k draws batches k, k + n, k + 2 n, ...

    Worker k seeds torch and ``random`` with the epoch's base seed plus k. It seeds numpy with torch's own
    function of the two (torch/utils/data/_utils/worker.py). A data set's own generator is a copy of its state
    at the start of the epoch. Fewer workers, or none, use these streams, and each makes every batch of its
    streams.
    """

    def __init__(self, workers: int, base_seed: int, dataset: Dataset) -> None:
        self.workers = workers
        self._dataset = dataset
        self._batch: int | None = None
        self._initial_states = [_seeded_states(base_seed, worker) for worker in range(workers)]
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rngs": [], "_states": []}

    def _reset(self) -> None:
        self._process = os.getpid()
        self._rngs = own_generators(self._dataset)
        self._states = [(*seeded, states(self._rngs)[3]) for seeded in self._initial_states]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Draw the next batch from the generators of the worker whose turn it is."""
        info = torch.utils.data.get_worker_info()
        if self._process != os.getpid():
            self._reset()
        if self._batch is None:
            self._batch = info.id if info is not None else 0
        process_states, worker = states(self._rngs), self._batch % self.workers
        restore_states(self._states[worker])
        try:
            yield
        finally:
            self._states[worker] = states(self._rngs)
            restore_states(process_states)
            self._batch += info.num_workers if info is not None else 1


def can_emulate(workers: int, requested: int) -> bool:
    """Whether fewer workers can reproduce the draws of those asked for, each with whole streams."""
    return workers < requested and (workers == 0 or requested % workers == 0)


def seeds_itself(loader: DataLoader) -> bool:
    """Whether the draws of this DataLoader's workers cannot be reproduced for them."""
    return bool(loader.worker_init_fn is not None or loader.persistent_workers)


def custom_sampler(sampler: Sampler, batch_sampler: object) -> str:
    """The class of a sampler whose order comes from the script's code or is drawn step by step, or "".

    If the script's generator draws it step by step, other draws may depend on the order, or the order on the
    training.
    """
    plain = (type(None), list, tuple, range)
    return next(
        (
            type(candidate).__name__
            for candidate in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
            if (
                type(candidate) not in plain
                and not type(candidate).__module__.startswith("torch.utils.data.")
            )
            or _draws_repeatedly(candidate)
        ),
        "",
    )


def _draws_repeatedly(sampler: Sampler) -> bool:
    """Whether a RandomSampler draws repeatedly from its own generator.

    It does with replacement, or for more samples than the data set has.
    """
    if type(sampler) is not torch.utils.data.RandomSampler or sampler.generator is None:
        return False
    return bool(sampler.replacement or sampler.num_samples > len(sampler.data_source))


def without_workers(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a DataLoader without those that only apply to workers."""
    only_for_workers = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context")
    return {
        **{name: value for name, value in arguments.items() if name not in only_for_workers},
        "num_workers": 0,
    }


def _seeded_states(base_seed: int, worker: int) -> tuple[Any, Any, Any]:
    """Return seeded states of torch, ``random`` and numpy. Seeding the process would seed devices too."""
    from torch.utils.data._utils.worker import _generate_state

    numpy = sys.modules.get("numpy")
    of_torch = torch.Generator().manual_seed(base_seed + worker).get_state()
    of_numpy = numpy.random.RandomState(_generate_state(base_seed, worker)).get_state() if numpy else None
    return of_torch, random.Random(base_seed + worker).getstate(), of_numpy
