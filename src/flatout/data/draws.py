"""Random numbers for a whole batch at once, identical to those of one call per number.

torch's CPU generator is a Mersenne Twister, and calls use its 32-bit words in order. ``torch.rand`` in
float32 takes the low 24 bits of one word, and ``torch.randint`` below 2**28 one word modulo its range. 64-bit
integers over their whole range take two words, the first one high. So the words of a batch can be read as
64-bit integers and distributed afterwards. The generator ends where separate calls would have left it.

Source: ATen/core/DistributionsHelper.h (torch 2.11 to 2.14). `understood` checks the installed torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Uniform:
    """``torch.rand(1)``."""

    def of(self, words: Tensor) -> Tensor:
        """Return one float32 per word: its low 24 bits, as a fraction."""
        return ((words & 0xFFFFFF).double() * 2.0**-24).float()

    def draw(self, generator: torch.Generator) -> Tensor:
        return torch.rand(1, generator=generator)


@dataclass(frozen=True)
class Integer:
    """``torch.randint(0, below, (1,))``, for ``below`` up to 2**28."""

    below: int

    def of(self, words: Tensor) -> Tensor:
        return words % self.below

    def draw(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, self.below, (1,), generator=generator)


Draw = Uniform | Integer


def columns(kinds: Sequence[Draw], rows: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Return a tensor of ``rows`` numbers for each kind, drawn row by row: all kinds of row 0 first."""
    generator = generator or torch.default_generator
    count = rows * len(kinds)
    if count == 0:
        return [torch.empty(0) for _ in kinds]
    words = _read(count - count % 2, generator)
    if count % 2:  # a single word is not available; draw the last number as torch draws it
        words = torch.cat((words, words.new_zeros(1)))
    tensors = [
        kind.of(column) for kind, column in zip(kinds, words.view(rows, len(kinds)).unbind(1), strict=True)
    ]
    if count % 2:
        tensors[-1][-1] = kinds[-1].draw(generator)[0]
    return tensors


def _read(count: int, generator: torch.Generator) -> Tensor:
    """Return the next words as int64 [count]; ``count`` is even."""
    pairs = torch.empty(count // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return torch.stack((pairs >> 32 & 0xFFFFFFFF, pairs & 0xFFFFFFFF), dim=1).flatten()


@cache
def understood() -> bool:
    """Return whether this torch draws as described above: 64 numbers of each kind, and the final state."""
    kinds = (Uniform(), Integer(9), Integer(2**20 + 7))
    bulk, single = (torch.Generator().manual_seed(1301) for _ in range(2))
    together = columns(kinds, 64, bulk)
    one_by_one = [[kind.draw(single) for kind in kinds] for _ in range(64)]
    same = all(
        together[column][row] == one_by_one[row][column] for row in range(64) for column in range(len(kinds))
    )
    return same and torch.equal(bulk.get_state(), single.get_state())
