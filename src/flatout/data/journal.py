"""The random numbers of deferred calls, drawn at each call, or later for all calls in their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.data.draws import columns
from flatout.data.operation import BatchOperation, ImageShape, listed_draws

LONGEST_PATTERN = 16  # most calls per sample that are recognised as a pattern


class CallDraws:
    """The numbers of one call: the entries at ``place`` of columns, which may have been drawn for many calls."""

    __slots__ = ("block", "operations", "place", "shape")

    def __init__(self, operations: tuple[BatchOperation, ...], shape: ImageShape) -> None:
        self.operations = operations
        self.shape = shape
        self.block: list[list[Tensor]] = []  # the columns of each operation
        self.place = 0

    def draw(self) -> None:
        """Draw the numbers of this call alone."""
        self.block = [
            [kind.draw(torch.default_generator) for kind in kinds]
            for kinds in listed_draws(self.operations, self.shape)
        ]


def numbers_of(draws: Sequence[CallDraws]) -> list[list[Tensor]]:
    """Return the numbers of several calls with the same operations and shape, in the operations' format."""
    block = draws[0].block
    places = [call.place for call in draws]
    if any(call.block is not block for call in draws):
        return [
            [
                torch.cat(
                    [
                        call.block[number][column][place : place + 1]
                        for call, place in zip(draws, places, strict=True)
                    ]
                )
                for column in range(len(columns_of_one))
            ]
            for number, columns_of_one in enumerate(block)
        ]
    rows = next((len(column) for columns_of_one in block for column in columns_of_one), 0)
    if places == list(range(rows)):
        return block
    index = torch.tensor(places)
    return [[column[index] for column in columns_of_one] for columns_of_one in block]


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
            draws.draw()
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
        if period == 0:
            for draws in waiting:
                draws.draw()
            return
        listed = [listed_draws(draws.operations, draws.shape) for draws in waiting[:period]]
        drawn = iter(
            columns([kind for call in listed for kinds in call for kind in kinds], len(waiting) // period)
        )
        blocks = [[[next(drawn) for _ in kinds] for kinds in call] for call in listed]
        for position, draws in enumerate(waiting):
            draws.block, draws.place = blocks[position % period], position // period


def _period(waiting: Sequence[CallDraws]) -> int:
    """Return the period of the calls: 1 if all are alike, 2 for pairs, and so on; 0 without a pattern."""
    keys = [(id(call.operations), call.shape) for call in waiting]
    for period in range(1, min(LONGEST_PATTERN, len(keys)) + 1):
        if len(keys) % period == 0 and keys == keys[:period] * (len(keys) // period):
            return period
    return 0
