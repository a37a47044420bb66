"""What a reader of operators needs: arguments, masks, and the attention found so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class ArgumentReader(Protocol):
    """Interprets an argument."""

    def tensor(self, thing: object) -> Any:
        """An object with the shape, dtype and device of this tensor; None if it is not a tensor."""

    def number(self, thing: object) -> float | None:
        """The value of a number, also in a tensor, if it is known."""

    def same(self, one: object, other: object) -> bool:
        """Whether two sizes are known to be equal."""


@dataclass(frozen=True)
class Mask:
    """One mask.

    ``kind``: "drop" (true: excluded), "keep" (true: kept), or "add". ``fill`` is the value of excluded
    scores. ``dtype`` is that of the masked scores. ``sizes`` are those of the mask, possibly viewed at other
    batch axes than those where it was applied.
    """

    kind: str
    tensor: Tensor
    fill: float
    dtype: torch.dtype
    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class AttentionForm:
    """Scores or weights [*batch, rows, columns].

    With their axes in the order of ``q_axes`` and ``k_axes`` (None: unchanged), queries are [*batch, rows,
    width] and keys [*batch, columns, width], up to sizes of 1 in the batch. ``dtype`` is that of their
    product. ``masked`` are the batch sizes at which the masks were applied, ``first`` those of the product.
    """

    q: Tensor
    k: Tensor
    q_axes: tuple[int, ...] | None
    k_axes: tuple[int, ...] | None
    first: tuple[Any, ...]
    batch: tuple[Any, ...]
    rows: Any
    columns: Any
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    masked: tuple[Any, ...] = ()
    is_weights: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        return (*self.batch, self.rows, self.columns)


@dataclass(frozen=True)
class AttentionMatch:
    """The product with the values, [*batch, columns, width] with axes in the order of ``v_axes``.

    ``axes`` gives the order of the result's axes.
    """

    form: AttentionForm
    v: Tensor
    v_axes: tuple[int, ...] | None
    axes: tuple[int, ...] | None
