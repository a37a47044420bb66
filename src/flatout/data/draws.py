"""Random numbers for a whole batch at once, identical to those of one call per number.

torch's CPU generator is a Mersenne Twister, and calls use its 32-bit words in order. ``torch.rand`` in
float32 takes the low 24 bits of one word. ``torch.randint`` below 2**28 takes one word modulo its range, and
``torch.randperm(n)`` takes n - 1 words. 64-bit integers over their whole range take two words, the first one
high. So the words of a batch can be read as 64-bit integers and distributed afterwards. The generator ends
where separate calls would have left it.

Source: ATen/core/DistributionsHelper.h, ATen/core/TransformationHelper.h and ATen/native/TensorFactories.cpp
(torch 2.11 to 2.14). `matches_torch` checks the installed torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

MIN_READ_WORDS = 64  # minimum number of words that `BulkNumberSource` reads at a time


@dataclass(frozen=True)
class Uniform:
    """``torch.empty(1).uniform_(low, high)``; ``torch.rand(1)`` is the case from 0 to 1."""

    low: float = 0.0
    high: float = 1.0

    def from_words(self, words: Tensor) -> Tensor:
        """One float32 per word.

        The kernel multiplies and adds with a single rounding. A result rounded up to ``high`` becomes
        ``low``.
        """
        low, high = c_float(self.low).value, c_float(self.high).value
        if low == 0 and high == 1:  # exact in float32
            return (words & 0xFFFFFF).float().mul_(2.0**-24)
        numbers = _add_rounding_to_odd(
            (words & 0xFFFFFF).double() * 2.0**-24 * c_float(high - low).value, low
        ).float()
        return numbers.masked_fill_(numbers >= high, low) if high > low else numbers

    def draw(self, generator: torch.Generator) -> Tensor:
        return torch.empty(1).uniform_(self.low, self.high, generator=generator)


@dataclass(frozen=True)
class Integer:
    """``torch.randint(0, below, (1,))``, for ``below`` up to 2**28."""

    below: int

    def from_words(self, words: Tensor) -> Tensor:
        return words % self.below

    def draw(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, self.below, (1,), generator=generator)


Draw = Uniform | Integer


def _add_rounding_to_odd(product: Tensor, low: float) -> Tensor:
    """Return product + low in float64, such that rounding it to float32 equals a single rounding.

    The product of two float32 numbers is exact in float64, but the sum may not be. A sum that was rounded to
    a tie would be rounded again. With rounding to odd, the second rounding gives the result of a single one
    (Boldo and Melquiond, 2008).
    """
    total = product + low
    back = total - product
    rest = (product - (total - back)) + (low - back)
    inexact_and_even = (rest != 0) & (total.view(torch.int64) & 1 == 0)
    return torch.where(inexact_and_even, torch.nextafter(total, rest.sign() * math.inf), total)


def draw_columns(kinds: Sequence[Draw], rows: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """A tensor of ``rows`` numbers for each kind, drawn row by row: all kinds of row 0 first."""
    generator = generator or torch.default_generator
    count = rows * len(kinds)
    if count == 0:
        return [torch.empty(0) for _ in kinds]
    words = _next_words(count - count % 2, generator)
    if count % 2:  # a single word is not available; draw the last number as torch draws it
        words = torch.cat((words, words.new_zeros(1)))
    tensors = [
        kind.from_words(column)
        for kind, column in zip(kinds, words.view(rows, len(kinds)).unbind(1), strict=True)
    ]
    if count % 2:
        tensors[-1][-1] = kinds[-1].draw(generator)[0]
    return tensors


def _next_words(count: int, generator: torch.Generator) -> Tensor:
    pairs = torch.empty(count // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return pairs.view(torch.int32).view(-1, 2).flip(1).view(torch.uint32).flatten().long()


class NumberSource:
    """Draws Python numbers one at a time with torch's own calls. `BulkNumberSource` gives the same numbers faster."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator or torch.default_generator

    def uniform(self, low: float, high: float) -> float:
        """``torch.empty(1).uniform_(low, high).item()``."""
        return torch.empty(1).uniform_(low, high, generator=self.generator).item()

    def randint(self, low: int, high: int) -> int:
        """``torch.randint(low, high, (1,)).item()``, for ranges up to 2**28."""
        return int(torch.randint(low, high, (1,), generator=self.generator).item())

    def draw(self, kind: Draw) -> float:
        return self.uniform(kind.low, kind.high) if isinstance(kind, Uniform) else self.randint(0, kind.below)


class BulkNumberSource(NumberSource):
    """Reads the next words of a generator ahead, at a quarter of the cost of one call per number.

    Use it as a context manager: on exit, the generator is where torch's own calls would have left it.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__(generator)
        self._state: Tensor | None = None
        self._words: list[int] = []
        self._position = 0

    def __enter__(self) -> BulkNumberSource:
        return self

    def __exit__(self, *_: object) -> None:
        if self._words:
            self.generator.set_state(self._state)
            if self._position > 1:
                torch.empty(self._position // 2, dtype=torch.int64).random_(
                    -(2**63), None, generator=self.generator
                )
            if self._position % 2:
                torch.empty(1, dtype=torch.int32).random_(generator=self.generator)

    def uniform(self, low: float, high: float) -> float:
        low, high = c_float(low).value, c_float(high).value
        product = (self._word() & 0xFFFFFF) * 2.0**-24 * c_float(high - low).value
        total = product + low
        if total - product != low or total - low != product:
            total = _add_rounding_to_odd(torch.tensor(product, dtype=torch.float64), low).item()
        value = c_float(total).value
        return low if value >= high > low else value

    def randint(self, low: int, high: int) -> int:
        return low + self._word() % (high - low)

    def _word(self) -> int:
        if self._position == len(self._words):
            if self._state is None:
                self._state = self.generator.get_state()
            self._words += _next_words(max(MIN_READ_WORDS, len(self._words)), self.generator).tolist()
        self._position += 1
        return self._words[self._position - 1]


@cache
def matches_torch() -> bool:
    """Whether this torch draws as described above: 64 numbers of each kind, and the final state."""
    kinds = (
        Uniform(),
        Uniform(-0.3, 1.7),
        Uniform(1.0, 1.0001),
        Uniform(math.log(0.75), math.log(4 / 3)),
        Integer(9),
        Integer(2**20 + 7),
    )
    bulk, single, read = (torch.Generator().manual_seed(1301) for _ in range(3))
    batched = draw_columns(kinds, 64, bulk)
    one_by_one = [[kind.draw(single) for kind in kinds] for _ in range(64)]
    with BulkNumberSource(read) as source:
        read_ahead = [[source.draw(kind) for kind in kinds] for _ in range(64)]
    same = all(
        batched[column][row] == one_by_one[row][column] == read_ahead[row][column]
        for row in range(64)
        for column in range(len(kinds))
    )
    same_end = torch.equal(bulk.get_state(), single.get_state())
    return same and same_end and torch.equal(read.get_state(), single.get_state())
