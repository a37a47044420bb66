"""The random numbers of deferred calls, drawn at each call, or later for all calls in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.data.draws import BulkNumberSource, NumberSource
from flatout.data.operation import BatchOperation, ImageShape, draw_listed, draw_row, rows_to_columns

MAX_PATTERN_CALLS = 16  # most calls per sample that are recognised as a pattern


@dataclass(slots=True, eq=False)
class CallDraws:
    """The numbers of one call: a separate row, or an index into columns drawn for many calls."""

    operations: tuple[BatchOperation, ...]
    shape: ImageShape
    row: list[Any] | None = None
    shared_columns: list[Sequence[Any]] | None = None
    index: int = 0

    def numbers(self) -> list[Any]:
        """The row of this call; an operation with listed draws gets a tuple of numbers."""
        if self.row is not None:
            return self.row
        shared_columns, numbers, shape = self.shared_columns or [], [], self.shape
        for operation, columns in zip(self.operations, shared_columns, strict=True):
            listed = operation.draws(shape) is not None
            numbers.append(
                tuple(column[self.index].item() for column in columns) if listed else columns[self.index]
            )
            shape = operation.shape(shape)
        return numbers


def numbers_of(draws: Sequence[CallDraws]) -> list[Sequence[Any]]:
    """The numbers of several calls with the same operations and shape, in the operations' format."""
    first = draws[0]
    shared_columns = first.shared_columns
    if shared_columns is None or any(draw.shared_columns is not shared_columns for draw in draws):
        return rows_to_columns(first.operations, [draw.numbers() for draw in draws], first.shape)
    indices = [draw.index for draw in draws]
    rows = next(
        (len(column) for columns in shared_columns for column in columns if isinstance(column, Tensor)), 0
    )
    if indices == list(range(rows)):
        return shared_columns
    rows_read = torch.tensor(indices)
    return [[column[rows_read] for column in columns] for columns in shared_columns]


class DrawJournal:
    """Calls whose numbers are not drawn yet, in their original order.

    Numbers may be drawn later only if no other code draws from torch's generator in between. `in_order`
    becomes False once it does, and the numbers are then in a different order.
    """

    def __init__(self, draw_now: bool) -> None:
        self.draw_now = draw_now
        self.in_order = True
        self._undrawn: list[CallDraws] = []
        self._state: Tensor | None = None  # of torch's generator at the first waiting call

    def add(self, operations: tuple[BatchOperation, ...], shape: ImageShape) -> CallDraws:
        draws = CallDraws(operations, shape)
        if self.draw_now:
            draws.row = draw_row(operations, shape, NumberSource())
            return draws
        if not self._undrawn:
            self._state = torch.get_rng_state()
        self._undrawn.append(draws)
        return draws

    def interrupt(self) -> None:
        """Record that the generator is being set."""
        self.in_order = self.in_order and not self._undrawn

    def draw_pending(self) -> None:
        """Draw the numbers of every waiting call."""
        if not self._undrawn:
            return
        calls, self._undrawn = self._undrawn, []
        self.in_order = (
            self.in_order and self._state is not None and torch.equal(torch.get_rng_state(), self._state)
        )
        period = _period(calls)
        pattern = [(draws.operations, draws.shape) for draws in calls[:period]]
        blocks = draw_listed(pattern, len(calls) // period) if period else None
        if blocks is None:
            with BulkNumberSource() as source:
                for draws in calls:
                    draws.row = draw_row(draws.operations, draws.shape, source)
            return
        for position, draws in enumerate(calls):
            draws.shared_columns, draws.index = blocks[position % period], position // period


def _period(calls: Sequence[CallDraws]) -> int:
    """The period of the calls: 1 if all are alike, 2 for pairs, and so on; 0 without a pattern."""
    keys = [(id(call.operations), call.shape) for call in calls]
    for period in range(1, min(MAX_PATTERN_CALLS, len(keys)) + 1):
        if len(keys) % period == 0 and keys == keys[:period] * (len(keys) // period):
            return period
    return 0
