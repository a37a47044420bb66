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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial, wraps
from typing import Any

import torch
from torch import Tensor

from flatout.data.deferred import METADATA, deferred_image, is_deferred, leaves, materialize
from flatout.data.operation import ImageForm

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

    def send(self, groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Start one copy of all columns of numbers [B] to the device. Other values stay."""
        columns = [value for group in groups for value in group if isinstance(value, Tensor)]
        words = [column if column.itemsize == 8 else column.view(torch.int32).long() for column in columns]
        pinned = self._stream is not None
        packed = torch.empty((len(words), len(words[0])), dtype=torch.int64, pin_memory=pinned)
        rows = iter(torch.stack(words, out=packed).to(self.device, non_blocking=True))

        def sent(value: Any) -> Any:
            row = next(rows) if isinstance(value, Tensor) else value
            return row.int().view(value.dtype) if row is not value and value.itemsize == 4 else row

        return [[sent(value) for value in group] for group in groups]


class DeviceCopies:
    """The device copies of host tensors. Also reports where registered host tensors are moved to."""

    def __init__(self) -> None:
        # weak reference, version, device copy and event, or None and who is told of the move
        self._entries: dict[int, tuple[Any, int, Tensor | None, Any]] = {}

    def offer(self, host: Tensor, device_copy: Tensor | None, event: Any) -> None:
        if len(self._entries) >= MAX_COPIES:
            self._entries.pop(next(iter(self._entries)))
        self._entries[id(host)] = (weakref.ref(host), host._version, device_copy, event)

    def observe_move(self, host: Tensor, moved: Callable[[torch.device], None]) -> None:
        """Call ``moved`` with the device that the script moves this tensor to."""
        self.offer(host, None, moved)

    def take(self, host: Tensor, device: torch.device) -> Tensor | None:
        """The copy of this tensor on this device, or None: the caller then copies as usual."""
        if is_deferred(host):
            batch = vars(host)["pending"]
            return batch.take(device) if isinstance(batch, BatchOnDevice) else None
        entry = self._entries.pop(id(host), None)
        if entry is None or entry[0]() is not host:
            return None
        _, version, device_copy, event = entry
        if device_copy is None:
            event(device)
        elif version == host._version and device_copy.device == device:
            _use(device_copy, event)
            return device_copy
        return None


def _use(device_copy: Tensor, event: Any) -> None:
    """Let the current stream use what another stream makes until the event."""
    if event is not None:
        stream = torch.cuda.current_stream(device_copy.device)
        stream.wait_event(event)
        device_copy.record_stream(stream)


class BatchOnDevice:
    """What a deferred host tensor stands for: it is copied to the host when the program accesses it.

    A move to the device returns a copy, because the program may write to it.
    """

    metadata_known = True

    def __init__(self, stream: CopyStream, tensor: Tensor, pinned: bool = False) -> None:
        self.out_shape, self.form = tensor.shape, ImageForm("tensor", tensor.dtype)
        self.recorder, self.answers = self, ANSWERS
        self.stream, self.tensor, self.pinned = stream, tensor, pinned

    def take(self, device: torch.device) -> Tensor | None:
        if device != self.tensor.device:
            return None
        _use(self.tensor, self.stream.record_event())
        return self.tensor.clone()

    def on_access(self, host: Tensor) -> None:
        with torch.inference_mode(False), self.stream.open():
            value = self.tensor.cpu()  # waits for this stream and not for the script's work
            materialize(host, value.pin_memory() if self.pinned else value)

    def stack(self, images: Sequence[Tensor]) -> None:
        """None: the program stacks them itself."""


ANSWERS = {
    **METADATA,
    Tensor.is_pinned: lambda pending, *_: pending.pinned,
    Tensor.pin_memory: lambda pending, *_: deferred_image(
        BatchOnDevice(pending.stream, pending.tensor, True)
    ),
}


class ResidentDevice:
    """A device that makes batches of kept samples. The script receives deferred host tensors.

    The samples are on the device too. With ``on_host`` they are in host memory, and each batch is copied from
    there.
    """

    def __init__(self, device: torch.device, on_host: bool = False) -> None:
        self.device, self.on_host = device, on_host

    @cached_property  # a stream belongs to the process that uses it
    def stream(self) -> CopyStream:
        return CopyStream(self.device)

    def to_host(self, tensor: Tensor) -> Any:
        return deferred_image(BatchOnDevice(self.stream, tensor))


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
            if is_deferred(tensor):  # it is on the device
                continue
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
    intercept_moves(lambda tensor, device, _: device_copies.take(tensor, device), ledger)


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
