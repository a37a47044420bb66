"""How one bucket of numbers becomes the mean over all ranks: as it is, or in fewer bytes.

A wire sends in phases, because some ways need more than one collective. ``send`` is a generator: it starts a collective with ``start(tensor)``, yields
what is to be waited for, and returns the mean. Whoever drives it (convoy.py) advances all buckets in one order, which must be the same on every rank.

    plain       float32 as it is
    bf16        half the bytes; the exponent of float32, three digits. Divided by the ranks before the cast, so that the sum of all is no larger than the
                largest of them; summed in bfloat16 by the backend (NCCL since 2.10; gloo, tried with torch 2.14), one rounding a rank
    fp16        half the bytes; four digits, from 6e-8 to 65,504. Gradients are neither that large nor that small, so each bucket has a scale, a power of
                two that every rank takes from the mean of the pass before: no further collective. A bucket that overflows all the same, or sinks (every
                rank sees it in the sum), is sent again as it is
    powersgd    see powersgd.py
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Sending = Generator[Any, None, Any]
Start = Callable[[Any], Any]  # a tensor, summed in place over the ranks: what to wait for

ROOM = 2.0**9  # where the largest number of a bucket is put: 128 times as much fits into float16, and 2**-33 of it is still seen
LEAST = 1.0  # where the largest number has to be for the others to be seen
LARGEST_SCALE = 2.0**100


class Wire(Protocol):
    """``lossy``: what passes it comes back rounded, so that nothing may pass it twice. ``remembers``: what it sends depends on what it has sent."""

    lossy: bool
    remembers: bool

    def send(self, flat: Any, parameters: Sequence[Any], start: Start) -> Sending:
        """``flat`` is this rank's, laid out as the parameters are, and may be overwritten. Every rank sends the same parameters in the same order."""


class Plain:
    lossy = remembers = False

    def __init__(self, torch: Any, world: int) -> None:
        self.world = world

    def send(self, flat: Any, parameters: Sequence[Any], start: Start) -> Sending:
        yield start(flat)
        return flat.div_(self.world)


class Brain:
    """bfloat16."""

    lossy, remembers = True, False

    def __init__(self, torch: Any, world: int) -> None:
        self.torch, self.world = torch, world

    def send(self, flat: Any, parameters: Sequence[Any], start: Start) -> Sending:
        if not wide(self.torch, flat):
            return (yield from Plain(self.torch, self.world).send(flat, parameters, start))
        small = flat.div(self.world).to(self.torch.bfloat16)
        yield start(small)
        return flat.copy_(small)


class Half:
    """float16. ``scales`` by the first parameter of a bucket; a bucket without one is sent as it is, to learn how large its numbers are."""

    lossy = remembers = True

    def __init__(self, torch: Any, world: int) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self.torch, self.world = torch, world
        self.scales: Any = WeakTensorKeyDictionary()

    def send(self, flat: Any, parameters: Sequence[Any], start: Start) -> Sending:
        plain = Plain(self.torch, self.world)
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
            self.scales[parameters[0]] = min(LARGEST_SCALE, max(1 / LARGEST_SCALE, ROOM / 2.0 ** math.ceil(math.log2(largest))))
        return mean


def wide(torch: Any, flat: Any) -> bool:
    """Whether there is anything to save."""
    return flat.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class Way:
    """A kind of wire by its name, and how one is made for so many ranks. Two of one name are the same."""

    name: str
    make: Callable[[Any, int], Wire]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Way) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


PLAIN = Way("plain", Plain)
BF16, FP16 = Way("bf16", Brain), Way("fp16", Half)


@dataclass(frozen=True)
class Terms:
    """How gradients travel: what every rank must do alike. ``bucket_bytes``: None for one bucket of each dtype."""

    way: Way = PLAIN
    bucket_bytes: int | None = 25 * 2**20  # what torch's own DistributedDataParallel takes

    @property
    def word(self) -> float:
        """A number that float32 holds exactly, and that others do not share: ranks tell each other what they want by it."""
        return float(1 + (zlib.crc32(f"{self.way.name} {self.bucket_bytes}".encode()) & 0x7FFFFF))
