"""The random numbers of calls that were put off: drawn as each call happens, or for all calls together in the order in which they happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.pipeline.draws import Numbers, Words, columns
from flatout.pipeline.operation import Operation, Shape, listed_draws, row_of, rows_together

LONGEST_PATTERN = 16  # calls for each sample that are recognised as a pattern


class Draws:
    """The numbers of one call: a row of its own, or a place in columns that were drawn for many calls."""

    __slots__ = ("block", "operations", "place", "row", "shape")

    def __init__(self, operations: tuple[Operation, ...], shape: Shape) -> None:
        self.operations = operations
        self.shape = shape
        self.row: list[Any] | None = None
        self.block: list[Sequence[Any]] | None = None
        self.place = 0

    def alone(self) -> list[Any]:
        """The row of this call; for an operation whose draws are listed, a tuple of numbers."""
        if self.row is not None:
            return self.row
        block, found, shape = self.block or [], [], self.shape
        for operation, held in zip(self.operations, block, strict=True):
            listed = operation.draws(shape) is not None
            found.append(tuple(column[self.place].item() for column in held) if listed else held[self.place])
            shape = operation.shape(shape)
        return found


def numbers_of(draws: Sequence[Draws]) -> list[Sequence[Any]]:
    """The numbers of several calls with the same operations and shape, as the operations expect them."""
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


class Journal:
    """Calls whose numbers are still to be drawn, in the order in which they happened.

    Numbers may be drawn later only while nobody else draws from torch's generator in between; `in_order` is False once somebody did, and the
    numbers are then those of another order.
    """

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.in_order = True
        self._waiting: list[Draws] = []
        self._state: Tensor | None = None  # of torch's generator when the first call that waits happened

    def add(self, operations: tuple[Operation, ...], shape: Shape) -> Draws:
        draws = Draws(operations, shape)
        if self.at_once:
            draws.row = row_of(operations, shape, Numbers())
            return draws
        if not self._waiting:
            self._state = torch.get_rng_state()
        self._waiting.append(draws)
        return draws

    def interrupt(self) -> None:
        """Somebody sets the generator."""
        self.in_order = self.in_order and not self._waiting

    def settle(self) -> None:
        """Draw for every call that waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self.in_order = self.in_order and self._state is not None and torch.equal(torch.get_rng_state(), self._state)
        period = _period(waiting)
        listed = [listed_draws(each.operations, each.shape) for each in waiting[:period]]
        if period == 0 or any(each is None for each in listed):
            with Words() as words:
                for draws in waiting:
                    draws.row = row_of(draws.operations, draws.shape, words)
            return
        kinds = [kind for operations in listed for each in operations or () for kind in each]
        drawn = iter(columns(kinds, len(waiting) // period))
        blocks: list[list[Sequence[Any]]] = [[[next(drawn) for _ in each] for each in operations or ()] for operations in listed]
        for at, draws in enumerate(waiting):
            draws.block, draws.place = blocks[at % period], at // period


def _period(waiting: Sequence[Draws]) -> int:
    """After how many calls they repeat: 1 where all are alike, 2 for pairs; 0 where there is no such pattern."""
    keys = [(id(each.operations), each.shape) for each in waiting]
    for period in range(1, min(LONGEST_PATTERN, len(keys)) + 1):
        if len(keys) % period == 0 and keys == keys[:period] * (len(keys) // period):
            return period
    return 0
