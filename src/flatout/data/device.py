"""Put batches on the device before the script asks for them.

A script receives its batches on the host and moves them itself. flatout keeps a *device copy* of a host
tensor. When the script calls ``batch.to(device)``, it gets the device copy, once, and only if the host tensor
has not changed. Copies and gathers run on a separate stream. The stream that takes a device copy waits for
it, and the allocator is informed of its use there.

Source: CUDA semantics in the PyTorch documentation, "Memory management" and ``Tensor.record_stream``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from flatout.data.deferred import leaves

MOST_COPIES = 64  # of batches that the script received but never moved


class CopyStream:
    """Work parallel to the script's: a stream on a GPU; on the CPU, everything is ready immediately."""

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
        """Return an event for all work on the lane so far, or None if there is nothing to wait for."""
        return self._stream.record_event() if self._stream is not None else None

    def to_device(self, tensor: Tensor) -> Tensor:
        """Start a copy of a host tensor to the device, on the lane."""
        if self._stream is None:
            return tensor.clone()
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy of a device tensor to the host, on the lane. It is valid after the lane's mark."""
        if self._stream is None:
            return tensor.clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class DeviceCopies:
    """The device copies of host tensors. Also reports where registered host tensors are moved to."""

    def __init__(self) -> None:
        self._device_copies: dict[
            int, tuple[Any, int, Tensor, Any]
        ] = {}  # weak reference, version, device copy, mark
        self._noticed: dict[int, tuple[Any, Callable[[torch.device], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._device_copies or self._noticed)

    def offer(self, host: Tensor, device_copy: Tensor, mark: object) -> None:
        if len(self._device_copies) >= MOST_COPIES:
            self._device_copies.pop(next(iter(self._device_copies)))
        self._device_copies[id(host)] = (weakref.ref(host), host._version, device_copy, mark)

    def notice(self, host: Tensor, moved: Callable[[torch.device], None]) -> None:
        """Call ``moved`` with the device that the script moves this tensor to."""
        if len(self._noticed) >= MOST_COPIES:
            self._noticed.pop(next(iter(self._noticed)))
        self._noticed[id(host)] = (weakref.ref(host), moved)

    def take(self, host: Tensor, device: torch.device) -> Tensor | None:
        """Return the copy of this tensor on this device, or None: the caller then copies as usual."""
        noticed = self._noticed.pop(id(host), None)
        if noticed is not None and noticed[0]() is host:
            noticed[1](device)
        found = self._device_copies.pop(id(host), None)
        if found is None or found[0]() is not host or found[1] != host._version or found[2].device != device:
            return None
        _, _, device_copy, mark = found
        if mark is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(mark)
            device_copy.record_stream(stream)
        return device_copy


class ResidentDevice:
    """A device that makes batches of kept samples. The script receives host tensors with device copies.

    The samples are on the device too. With ``beside`` they are in host memory, and each batch is copied from
    there.
    """

    def __init__(self, device: torch.device, device_copies: DeviceCopies, beside: bool = False) -> None:
        self.device = device
        self.beside = beside
        self._device_copies = device_copies
        self._lane: CopyStream | None = None

    def made(self, make: Callable[[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], Any]) -> Any:
        """Return the result of ``make(to_host, to_device)`` once all its host copies are complete."""
        if self._lane is None:  # a stream belongs to the process that uses it
            self._lane = CopyStream(self.device)
        pairs: list[tuple[Tensor, Tensor]] = []

        def to_host(tensor: Tensor) -> Tensor:
            pairs.append((lane.to_host(tensor), tensor))
            return pairs[-1][0]

        lane = self._lane
        with lane.open():
            batch = make(to_host, lane.to_device if self.beside else as_it_is)
        mark = lane.mark()
        if mark is not None:
            mark.synchronize()  # only this lane waits: the model's work continues
        for host, device_copy in pairs:
            self._device_copies.offer(host, device_copy, mark)
        return batch


class DevicePrefetcher:
    """Replaces ``_next_data`` of an iterator: takes ``depth`` batches ahead and starts copying them.

    With a depth of 0, a copy starts when its batch is made, in the plain order. It then overlaps with the
    remaining device work of the previous step. Batches may only be taken ahead if making them draws nothing
    in this process. The first batch shows where the script moves its tensors; ``goes_to`` records it.
    """

    def __init__(
        self,
        iterator: Any,
        depth: int,
        device_copies: DeviceCopies,
        goes_to: dict[int, torch.device] | None = None,
    ) -> None:
        self._next = vars(iterator).get("_next_data") or partial(
            type(iterator)._next_data, weakref.proxy(iterator)
        )
        self._depth = depth
        self._device_copies = device_copies
        self._ready: deque[Any] = deque()
        self._goes_to = {} if goes_to is None else goes_to
        self._lanes: dict[torch.device, CopyStream] = {}
        self._ended = False

    def __call__(self) -> Any:
        while not self._ended and len(self._ready) < (self._depth + 1 if self._goes_to else 1):
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

    def _begin(self, batch: object) -> None:
        for at, tensor in enumerate(host_tensors(batch)):
            if at not in self._goes_to:
                self._device_copies.notice(tensor, lambda device, at=at: self._goes_to.update({at: device}))  # type: ignore[misc]
                continue
            device = self._goes_to[at]
            if device not in self._lanes:
                self._lanes[device] = CopyStream(device)
            lane = self._lanes[device]
            with lane.open():
                device_copy = lane.to_device(tensor)
                self._device_copies.offer(tensor, device_copy, lane.mark())


def host_tensors(batch: object) -> Iterator[Tensor]:
    """Yield the host tensors of a batch in order."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.device.type == "cpu")


def return_device_copies(device_copies: DeviceCopies, ledger: Any) -> None:
    """Make ``tensor.to(device)`` and ``tensor.cuda()`` return device copies until the ledger is restored."""

    def take(tensor: Tensor, device: torch.device, kwargs: dict[str, Any]) -> Tensor | None:
        return device_copies.take(tensor, device) if device_copies else None

    intercept_moves(take, ledger)


def move_without_waiting(ledger: Any) -> None:
    """Make copies from pinned memory to a CUDA device non-blocking. Stream order keeps them correct."""

    def request(tensor: Tensor, device: torch.device, kwargs: dict[str, Any]) -> None:
        if tensor.is_pinned():
            kwargs["non_blocking"] = True

    intercept_moves(request, ledger)


def intercept_moves(
    before: Callable[[Tensor, torch.device, dict[str, Any]], Tensor | None], ledger: Any
) -> None:
    """Call ``before(tensor, device, kwargs)`` when a host tensor only moves to a CUDA device.

    It returns the result, or None for the usual move, with these keywords.
    """

    def intercepted(move: Callable[..., Any], default: str | None) -> Callable[..., Any]:
        @wraps(move)
        def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not tensor.is_cuda and len(args) <= 1 and kwargs.keys() <= {"device", "non_blocking"}:
                target = args[0] if args else kwargs.get("device")
                device = device_of(default if target is None else target)
                result = before(tensor, device, kwargs) if device is not None else None
                if result is not None:
                    return result
            return move(tensor, *args, **kwargs)

        return moved

    for name, default in (("to", None), ("cuda", "cuda")):
        ledger.set(Tensor, name, intercepted(getattr(Tensor, name), default))


def device_of(target: object) -> torch.device | None:
    """Return the CUDA device that a target names, with its index, or None for anything else."""
    if isinstance(target, bool) or not isinstance(target, (int, str, torch.device)):
        return None
    try:
        device = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
    except RuntimeError:  # the script's mistake: its own error follows
        return None
    if device.type != "cuda":
        return None
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
