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
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from flatout.data.deferred import leaves

MAX_COPIES = 64  # of batches that the script received but never moved


class CopyStream:
    """Work parallel to the script's: a stream on a GPU; on the CPU, everything is ready immediately."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def open(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def record_event(self) -> Any:
        """An event for all work so far, or None if there is nothing to wait for."""
        return self._stream.record_event() if self._stream is not None else None

    def to_device(self, tensor: Tensor) -> Tensor:
        """Start a copy of a host tensor to the device."""
        if self._stream is None:
            return tensor.clone()
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy of a device tensor to the host. It is valid after the next event."""
        if self._stream is None:
            return tensor.clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )


def identity(tensor: Tensor) -> Tensor:
    return tensor


class DeviceCopies:
    """The device copies of host tensors. Also reports where registered host tensors are moved to."""

    def __init__(self) -> None:
        self._device_copies: dict[
            int, tuple[Any, int, Tensor, Any]
        ] = {}  # weak reference, version, device copy, mark
        self._observed: dict[int, tuple[Any, Callable[[torch.device], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._device_copies or self._observed)

    def offer(self, host: Tensor, device_copy: Tensor, event: object) -> None:
        if len(self._device_copies) >= MAX_COPIES:
            self._device_copies.pop(next(iter(self._device_copies)))
        self._device_copies[id(host)] = (weakref.ref(host), host._version, device_copy, event)

    def observe_move(self, host: Tensor, moved: Callable[[torch.device], None]) -> None:
        """Call ``moved`` with the device that the script moves this tensor to."""
        if len(self._observed) >= MAX_COPIES:
            self._observed.pop(next(iter(self._observed)))
        self._observed[id(host)] = (weakref.ref(host), moved)

    def take(self, host: Tensor, device: torch.device) -> Tensor | None:
        """The copy of this tensor on this device, or None: the caller then copies as usual."""
        observed = self._observed.pop(id(host), None)
        if observed is not None and observed[0]() is host:
            observed[1](device)
        entry = self._device_copies.pop(id(host), None)
        if entry is None or entry[0]() is not host or entry[1] != host._version or entry[2].device != device:
            return None
        _, _, device_copy, event = entry
        if event is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(event)
            device_copy.record_stream(stream)
        return device_copy


class ResidentDevice:
    """A device that makes batches of kept samples. The script receives host tensors with device copies.

    The samples are on the device too. With ``on_host`` they are in host memory, and each batch is copied from
    there.
    """

    def __init__(self, device: torch.device, device_copies: DeviceCopies, on_host: bool = False) -> None:
        self.device = device
        self.on_host = on_host
        self._device_copies = device_copies
        self._stream: CopyStream | None = None

    def make_batch(
        self, make: Callable[[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], Any]
    ) -> Any:
        """The result of ``make(to_host, to_device)`` once all its host copies are complete."""
        if self._stream is None:  # a stream belongs to the process that uses it
            self._stream = CopyStream(self.device)
        pairs: list[tuple[Tensor, Tensor]] = []

        def to_host(tensor: Tensor) -> Tensor:
            pairs.append((stream.to_host(tensor), tensor))
            return pairs[-1][0]

        stream = self._stream
        with stream.open():
            batch = make(to_host, stream.to_device if self.on_host else identity)
        event = stream.record_event()
        if event is not None:
            event.synchronize()  # only this stream waits: the model's work continues
        for host, device_copy in pairs:
            self._device_copies.offer(host, device_copy, event)
        return batch


class DevicePrefetcher:
    """Replaces ``_next_data`` of an iterator: takes ``depth`` batches ahead and starts copying them.

    With a depth of 0, a copy starts when its batch is made, in the plain order. It then overlaps with the
    remaining device work of the previous step. Batches may only be taken ahead if making them draws nothing
    in this process. The first batch shows where the script moves its tensors; ``targets`` records it.
    """

    def __init__(
        self,
        iterator: Any,
        depth: int,
        device_copies: DeviceCopies,
        targets: dict[int, torch.device] | None = None,
    ) -> None:
        self._next = vars(iterator).get("_next_data") or partial(
            type(iterator)._next_data, weakref.proxy(iterator)
        )
        self._depth = depth
        self._device_copies = device_copies
        self._ready: deque[Any] = deque()
        self._targets = {} if targets is None else targets
        self._streams: dict[torch.device, CopyStream] = {}
        self._ended = False

    def __call__(self) -> Any:
        while not self._ended and len(self._ready) < (self._depth + 1 if self._targets else 1):
            try:
                batch = self._next()
            except StopIteration:
                self._ended = True
                break
            except Exception as error:  # raised in its turn: the batches before it come first
                self._ready.append(error)
                break
            self._start_copies(batch)
            self._ready.append(batch)
        if not self._ready:
            self._ended = False  # a persistent iterator is asked again in the next epoch
            raise StopIteration
        batch = self._ready.popleft()
        if isinstance(batch, Exception):
            raise batch
        return batch

    def _start_copies(self, batch: object) -> None:
        for index, tensor in enumerate(host_tensors(batch)):
            if index not in self._targets:
                self._device_copies.observe_move(tensor, partial(self._targets.__setitem__, index))
                continue
            device = self._targets[index]
            if device not in self._streams:
                self._streams[device] = CopyStream(device)
            stream = self._streams[device]
            with stream.open():
                device_copy = stream.to_device(tensor)
                self._device_copies.offer(tensor, device_copy, stream.record_event())


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

    def make_non_blocking(tensor: Tensor, device: torch.device, kwargs: dict[str, Any]) -> None:
        if tensor.is_pinned():
            kwargs["non_blocking"] = True

    intercept_moves(make_non_blocking, ledger)


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
    """The CUDA device that a target names, with its index, or None for anything else."""
    if isinstance(target, bool) or not isinstance(target, (int, str, torch.device)):
        return None
    try:
        device = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
    except RuntimeError:  # the script's mistake: its own error follows
        return None
    if device.type != "cuda":
        return None
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
