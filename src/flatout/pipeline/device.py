"""Batches that are on the device before the script asks for them.

A script receives its batches on the host and moves them itself. What lies on the device already is the *twin* of a host tensor: when
the script says ``batch.to(device)`` it is handed the twin, once, and only while the host tensor still is what was copied. Copies and
gathers run on a stream of their own; the stream that takes a twin waits for it, and the allocator learns that it is used there.

Source: CUDA semantics in torch's documentation, "Memory management" and ``Tensor.record_stream``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

MOST_TWINS = 64  # of batches that the script took and never moved


class Lane:
    """Work beside the script's own: a stream where the device is a GPU; on the CPU everything is ready at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def open(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def mark(self) -> Any:
        """Stands for all work on the lane so far; None where it is done."""
        return self._stream.record_event() if self._stream is not None else None

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor, begun on the lane."""
        if self._stream is None:
            return tensor.clone()
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of a device tensor, begun on the lane: valid once the lane's mark has been waited for."""
        if self._stream is None:
            return tensor.clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class Twins:
    """Which host tensor has a twin on which device. A host tensor that was noticed tells where it was moved to."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[Any, int, Tensor, Any]] = {}  # weak reference, version, twin, mark
        self._noticed: dict[int, tuple[Any, Callable[[torch.device], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._twins or self._noticed)

    def offer(self, host: Tensor, twin: Tensor, mark: Any) -> None:
        if len(self._twins) >= MOST_TWINS:
            self._twins.pop(next(iter(self._twins)))
        self._twins[id(host)] = (weakref.ref(host), host._version, twin, mark)

    def notice(self, host: Tensor, moved: Callable[[torch.device], None]) -> None:
        """Call ``moved`` with the device that the script moves this tensor to."""
        if len(self._noticed) >= MOST_TWINS:
            self._noticed.pop(next(iter(self._noticed)))
        self._noticed[id(host)] = (weakref.ref(host), moved)

    def take(self, host: Tensor, device: torch.device) -> Tensor | None:
        """The twin of this tensor on this device, None where there is none: the caller copies as it would have."""
        noticed = self._noticed.pop(id(host), None)
        if noticed is not None and noticed[0]() is host:
            noticed[1](device)
        found = self._twins.pop(id(host), None)
        if found is None or found[0]() is not host or found[1] != host._version or found[2].device != device:
            return None
        _, _, twin, mark = found
        if mark is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(mark)
            twin.record_stream(stream)
        return twin


class Resident:
    """A device on which batches of kept samples are made; the host tensors that the script receives have their twins.

    The samples lie there, too, or (``beside``) in host memory, from where those of a batch are copied as they are kept.
    """

    def __init__(self, device: torch.device, twins: Twins, beside: bool = False) -> None:
        self.device = device
        self.beside = beside
        self._twins = twins
        self._lane: Lane | None = None

    def made(self, make: Callable[[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], Any]) -> Any:
        """What ``make(to_host, to_device)`` answers, once all host copies that it asked for are there."""
        if self._lane is None:  # a stream belongs to the process that uses it
            self._lane = Lane(self.device)
        pairs: list[tuple[Tensor, Tensor]] = []

        def to_host(tensor: Tensor) -> Tensor:
            pairs.append((lane.to_host(tensor), tensor))
            return pairs[-1][0]

        lane = self._lane
        with lane.open():
            batch = make(to_host, lane.to_device if self.beside else as_it_is)
        mark = lane.mark()
        if mark is not None:
            mark.synchronize()  # of this lane alone: the model's own work goes on
        for host, twin in pairs:
            self._twins.offer(host, twin, mark)
        return batch


class CopiesAhead:
    """Stands in the place of an iterator's ``_next_data``: takes ``depth`` batches ahead and begins to copy them.

    With a depth of 0, or while ``may`` answers False, a copy begins as its batch is made, in the plain order: beside what the device still has to do of the
    step before. Batches may only be taken ahead where nothing is drawn in this process for them. Where the script moves the tensors of a batch to is learned
    from the first one, and stands in ``goes_to``.
    """

    def __init__(self, iterator: Any, depth: int, twins: Twins, may: Callable[[], bool] = lambda: True, goes_to: dict[int, torch.device] | None = None) -> None:
        self._next = vars(iterator).get("_next_data") or partial(type(iterator)._next_data, weakref.proxy(iterator))
        self._depth = depth
        self._twins = twins
        self._may = may
        self._ready: deque[Any] = deque()
        self._goes_to = {} if goes_to is None else goes_to
        self._lanes: dict[torch.device, Lane] = {}
        self._ended = False

    def __call__(self) -> Any:
        while not self._ended and len(self._ready) < (self._depth + 1 if self._goes_to and self._may() else 1):
            try:
                batch = self._next()
            except StopIteration:
                self._ended = True
                break
            self._begin(batch)
            self._ready.append(batch)
        if not self._ready:
            self._ended = False  # a persistent iterator is asked again in the next epoch
            raise StopIteration
        return self._ready.popleft()

    def _begin(self, batch: Any) -> None:
        for at, tensor in enumerate(tensors_in(batch)):
            if at not in self._goes_to:
                self._twins.notice(tensor, lambda device, at=at: self._goes_to.update({at: device}))  # type: ignore[misc]
                continue
            device = self._goes_to[at]
            if device not in self._lanes:
                self._lanes[device] = Lane(device)
            lane = self._lanes[device]
            with lane.open():
                twin = lane.to_device(tensor)
                self._twins.offer(tensor, twin, lane.mark())


def tensors_in(batch: Any, depth: int = 0) -> Iterator[Tensor]:
    """The host tensors of a batch: nested lists, tuples and dictionaries, in order."""
    if isinstance(batch, Tensor):
        if batch.device.type == "cpu":
            yield batch
    elif depth < 6:
        for part in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ():
            yield from tensors_in(part, depth + 1)


def hand_out(twins: Twins, ledger: Any) -> None:
    """From now on ``tensor.to(device)`` and ``tensor.cuda()`` answer the twin where there is one, until the ledger is restored."""
    really_to, really_cuda = Tensor.to, Tensor.cuda

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_cuda and twins:
            device = device_of(args[0] if args else kwargs.get("device"))
            alone = len(args) <= 1 and kwargs.keys() <= {"device", "non_blocking"}
            twin = twins.take(tensor, device) if alone and device is not None else None
            if twin is not None:
                return twin
        return really_to(tensor, *args, **kwargs)

    def cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_cuda and twins:
            device = device_of(args[0] if args and args[0] is not None else kwargs.get("device") or "cuda")
            alone = len(args) <= 1 and kwargs.keys() <= {"device", "non_blocking"}
            twin = twins.take(tensor, device) if alone and device is not None else None
            if twin is not None:
                return twin
        return really_cuda(tensor, *args, **kwargs)

    ledger.set(Tensor, "to", to)
    ledger.set(Tensor, "cuda", cuda)


def device_of(target: Any) -> torch.device | None:
    """The CUDA device that a target names, with its number; None for anything else."""
    if isinstance(target, bool) or not isinstance(target, (int, str, torch.device)):
        return None
    try:
        device = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
    except RuntimeError:  # the script's own mistake, and its own error follows
        return None
    if device.type != "cuda":
        return None
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
