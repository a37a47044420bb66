"""Random numbers of a program that runs in several processes.

All ranks start from the same state. They draw the sampler order from the *common* stream, which equals the
plain run's if nothing else draws from it. A rank's random numbers for its own samples (dropout, noise,
augmentation) must differ between ranks, or the samples of a batch would share their noise. They come from the
rank's *own* stream.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class Streams:
    """torch's default generators, of the host and of the devices in use.

    They hold one stream while the other waits.

    If batches come from a DataLoader, the script draws from its own stream, except inside ``common``
    (``use_own`` begins this). If it draws its batches itself, it draws from the common stream, except inside
    ``own``.
    """

    def __init__(self, torch: ModuleType, rank: int) -> None:
        self.torch, self.rank = torch, rank
        self._inactive_states: dict[int, Any] = {}  # by generator, the state of the inactive stream
        self._in_own = False

    def use_own(self) -> None:
        """From now on the script draws from the rank's own stream."""
        if not self._in_own:
            self._swap(to_own=True)

    @contextmanager
    def common(self) -> Iterator[None]:
        """Draw from the common stream, equally on every rank."""
        with self._active(own=False):
            yield

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw from this rank's own stream."""
        with self._active(own=True):
            yield

    @contextmanager
    def _active(self, own: bool) -> Iterator[None]:
        if own == self._in_own:
            yield
            return
        self._swap(own)
        try:
            yield
        finally:
            self._swap(not own)

    def _swap(self, to_own: bool) -> None:
        for i, generator in enumerate(self._generators()):
            state = generator.get_state()
            if i in self._inactive_states:
                generator.set_state(self._inactive_states[i])
            elif to_own:
                generator.manual_seed(offset(generator.initial_seed(), self.rank))
            else:
                continue  # a device first used since the last swap
            self._inactive_states[i] = state
        self._in_own = to_own

    def _generators(self) -> list[Any]:
        cuda = self.torch.cuda
        return [self.torch.default_generator, *(cuda.default_generators if cuda.is_initialized() else ())]


class HostStreams:
    """Per-rank states of ``random`` and numpy while this process fetches samples.

    They are swapped out afterwards, so that the script's own random decisions stay the same on every rank. If
    a data set draws nothing in its first fetches, it is not checked again.
    """

    CHECKED_FETCHES = 8

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._own: Any = None
        self._fetches = 0
        self._uses_rng = False

    @contextmanager
    def own(self) -> Iterator[None]:
        if self._fetches >= self.CHECKED_FETCHES and not self._uses_rng:
            yield
            return
        self._fetches += 1
        common = _state()
        if self._own is None:
            self._own = _seeded(common, self.rank)
        _set_state(self._own)
        try:
            yield
        finally:
            state = _state()
            self._uses_rng = self._uses_rng or not _same(state, self._own)
            self._own = state
            _set_state(common)


def offset(seed: int, rank: int) -> int:
    """The seed of a rank's own stream."""
    return int.from_bytes(hashlib.sha256(f"{seed} {rank}".encode()).digest()[:7], "big")


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None and hasattr(numpy, "random") else None


def _state() -> tuple[Any, Any]:
    numpy = _numpy()
    return random.getstate(), numpy.get_state() if numpy is not None else None


def _set_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        _numpy().set_state(state[1])


def _seeded(state: tuple[Any, Any], rank: int) -> tuple[Any, Any]:
    """The state of both generators, seeded for this rank from the common state. Changes the generators."""
    seed = offset(hash(state[0][1][:8]), rank)
    random.seed(seed)
    if state[1] is not None:
        _numpy().seed(seed % 2**32)
    return _state()


def _same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    if a[0] != b[0] or (a[1] is None) != (b[1] is None):
        return False
    return a[1] is None or bool(a[1][2] == b[1][2] and (a[1][1] == b[1][1]).all())
