"""Turn one bucket of numbers into the mean over all ranks, uncompressed or in fewer bytes.

A codec sends in phases, because some methods need more than one collective. ``send`` is a generator: it starts
a collective with ``start(tensor)``, yields the handle to wait for, and returns the mean. The caller
(bucket_queue.py) advances all buckets in one order, which must be the same on every rank.

    plain       float32, uncompressed
    bf16        half the bytes; the exponent of float32, three digits. Divided by the number of ranks before
                the cast, so that the sum is no larger than the largest number; summed in bfloat16 by the
                backend (NCCL since 2.10; gloo, tested with torch 2.14), one rounding per rank
    fp16        half the bytes; four digits, from 6e-8 to 65,504. Gradients use neither extreme, so each
                bucket has a scale: a power of two that every rank derives from the mean of the previous pass,
                without a further collective. If a bucket still overflows or underflows (every rank sees it in
                the sum), it is sent again uncompressed
    powersgd    see powersgd.py
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Sending = Generator[Any, None, Any]
Start = Callable[[Any], Any]  # sums a tensor in place over the ranks; returns the handle to wait for

ROOM = 2.0**9  # target for a bucket's largest number: float16 holds 128 times as much, and 2**-33 of it
LEAST = 1.0  # minimum of the largest number, to keep the others representable
LARGEST_SCALE = 2.0**100


class GradientCodec(Protocol):
    """``lossy``: the result is rounded, so nothing may pass twice.

    ``remembers``: its output depends on earlier passes.
    """

    lossy: bool
    remembers: bool

    def send(self, flat: Tensor, parameters: Sequence[Any], start: Start) -> Sending:
        """``flat``: this rank's numbers in the layout of the parameters; may be overwritten.

        Every rank sends the same parameters in the same order.
        """


class PlainCodec:
    lossy = remembers = False

    def __init__(self, torch: ModuleType, world: int) -> None:
        self.world = world

    def send(self, flat: Tensor, parameters: Sequence[Any], start: Start) -> Sending:
        yield start(flat)
        return flat.div_(self.world)


class Bfloat16Codec:
    """bfloat16 codec."""

    lossy, remembers = True, False

    def __init__(self, torch: ModuleType, world: int) -> None:
        self.torch, self.world = torch, world

    def send(self, flat: Tensor, parameters: Sequence[Any], start: Start) -> Sending:
        if not wide(self.torch, flat):
            return (yield from PlainCodec(self.torch, self.world).send(flat, parameters, start))
        small = flat.div(self.world).to(self.torch.bfloat16)
        yield start(small)
        return flat.copy_(small)


class Float16Codec:
    """float16 codec. ``scales``: by the first parameter of a bucket.

    A bucket without a scale is sent uncompressed, to learn the size of its numbers.
    """

    lossy = remembers = True

    def __init__(self, torch: ModuleType, world: int) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self.torch, self.world = torch, world
        self.scales = WeakTensorKeyDictionary()

    def send(self, flat: Tensor, parameters: Sequence[Any], start: Start) -> Sending:
        plain = PlainCodec(self.torch, self.world)
        if not wide(self.torch, flat):
            return (yield from plain.send(flat, parameters, start))
        scale = self.scales.pop(parameters[0], None)
        largest = -1.0
        if scale is not None:
            small = flat.mul(scale / self.world).to(self.torch.float16)
            yield start(small)
            largest = float(small.abs().max())
        if scale is not None and LEAST <= largest < math.inf:
            mean, largest = flat.copy_(small).div_(scale), largest / scale
        else:
            mean = yield from plain.send(flat, parameters, start)
            largest = float(mean.abs().max()) if mean.numel() else 0.0
        if 0 < largest < math.inf:
            self.scales[parameters[0]] = min(
                LARGEST_SCALE, max(1 / LARGEST_SCALE, ROOM / 2.0 ** math.ceil(math.log2(largest)))
            )
        return mean


def wide(torch: ModuleType, flat: Tensor) -> bool:
    """Whether compression saves anything."""
    return flat.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class CodecKind:
    """A kind of wire by name, and its factory for a number of ranks. Equal names are equal."""

    name: str
    make: Callable[[Any, int], GradientCodec]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CodecKind) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


PLAIN = CodecKind("plain", PlainCodec)
BF16, FP16 = CodecKind("bf16", Bfloat16Codec), CodecKind("fp16", Float16Codec)


@dataclass(frozen=True)
class TransportSettings:
    """The transport of gradients, equal on every rank.

    ``bucket_bytes``: None for one bucket of each dtype.
    """

    way: CodecKind = PLAIN
    bucket_bytes: int | None = 25 * 2**20  # the default of torch's DistributedDataParallel

    @property
    def word(self) -> float:
        """A distinct number that float32 holds exactly: ranks exchange it to compare their terms."""
        return float(1 + (zlib.crc32(f"{self.way.name} {self.bucket_bytes}".encode()) & 0x7FFFFF))
