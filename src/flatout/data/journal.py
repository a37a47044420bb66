"""The random numbers of deferred calls, drawn at each call, or later for all calls in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.data.draws import BulkNumbers, Numbers, columns
from flatout.data.operation import BatchOperation, ImageShape, listed_draws, row_of, rows_together

LONGEST_PATTERN = 16  # most calls per sample that are recognised as a pattern


class CallDraws:
    """The numbers of one call: a separate row, or an index into columns drawn for many calls."""

    __slots__ = ("block", "operations", "place", "row", "shape")

    def __init__(self, operations: tuple[BatchOperation, ...], shape: ImageShape) -> None:
        self.operations = operations
        self.shape = shape
        self.row: list[Any] | None = None
        self.block: list[Sequence[Any]] | None = None
        self.place = 0

    def alone(self) -> list[Any]:
        """Return the row of this call; an operation with listed draws gets a tuple of numbers."""
        if self.row is not None:
            return self.row
        block, found, shape = self.block or [], [], self.shape
        for operation, held in zip(self.operations, block, strict=True):
            listed = operation.draws(shape) is not None
            found.append(tuple(column[self.place].item() for column in held) if listed else held[self.place])
            shape = operation.shape(shape)
        return found


def numbers_of(draws: Sequence[CallDraws]) -> list[Sequence[Any]]:
    """Return the numbers of several calls with the same operations and shape, in the operations' format."""
    first = draws[0]
    block = first.block
    if block is None or any(each.block is not block for each in draws):
        return rows_together(first.operations, [each.alone() for each in draws], first.shape)
    places = [each.place for each in draws]
    rows = next((len(column) for held in block for column in held if isinstance(column, Tensor)), 0)
    if places == list(range(rows)):
        return block
    at = torch.tensor(places)
    return [[column[at] for column in held] for held in block]


class DrawJournal:
    """Calls whose numbers are not drawn yet, in their original order.

    Numbers may be drawn later only if no other code draws from torch's generator in between. `in_order`
    becomes False once it does, and the numbers are then in a different order.
    """

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.in_order = True
        self._waiting: list[CallDraws] = []
        self._state: Tensor | None = None  # of torch's generator at the first waiting call

    def add(self, operations: tuple[BatchOperation, ...], shape: ImageShape) -> CallDraws:
        draws = CallDraws(operations, shape)
        if self.at_once:
            draws.row = row_of(operations, shape, Numbers())
            return draws
        if not self._waiting:
            self._state = torch.get_rng_state()
        self._waiting.append(draws)
        return draws

    def interrupt(self) -> None:
        """Record that the generator is being set."""
        self.in_order = self.in_order and not self._waiting

    def settle(self) -> None:
        """Draw the numbers of every waiting call."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self.in_order = (
            self.in_order and self._state is not None and torch.equal(torch.get_rng_state(), self._state)
        )
        period = _period(waiting)
        listed = [listed_draws(each.operations, each.shape) for each in waiting[:period]]
        if period == 0 or any(each is None for each in listed):
            with BulkNumbers() as words:
                for draws in waiting:
                    draws.row = row_of(draws.operations, draws.shape, words)
            return
        kinds = [kind for operations in listed for each in operations or () for kind in each]
        drawn = iter(columns(kinds, len(waiting) // period))
        blocks: list[list[Sequence[Any]]] = [
            [[next(drawn) for _ in each] for each in operations or ()] for operations in listed
        ]
        for at, draws in enumerate(waiting):
            draws.block, draws.place = blocks[at % period], at // period


def _period(waiting: Sequence[CallDraws]) -> int:
    """Return the period of the calls: 1 if all are alike, 2 for pairs, and so on; 0 without a pattern."""
    keys = [(id(call.operations), call.shape) for call in waiting]
    for period in range(1, min(LONGEST_PATTERN, len(keys)) + 1):
        if len(keys) % period == 0 and keys == keys[:period] * (len(keys) // period):
            return period
    return 0
