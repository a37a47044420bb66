"""The last stretch of a batch: the operations on all of its images together, and torch's own collation around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from flatout.pipeline.chain import Leaf
from flatout.pipeline.draws import Words
from flatout.pipeline.lowering import Lowered, form_of, shape_of, stack
from flatout.pipeline.operation import Shape, Unknown
from flatout.pipeline.store import Cell, Store
from flatout.pipeline.streams import same_states, states
from flatout.pipeline.ways import Way


def collated(ways: Sequence[Way], samples: Sequence[Any]) -> Any:
    """The batch of these samples, whose images may be left to be finished."""
    return collate(list(samples), collate_fn_map={Leaf: partial(_leaves, ways), **default_collate_fn_map})


def _leaves(ways: Sequence[Way], leaves: Sequence[Leaf], *, collate_fn_map: Any = None) -> Any:
    """Images of one pipeline and shape together; numbers that were not drawn with the image are drawn in the images' order."""
    first = ways[leaves[0].place].lowered
    if first is None:
        return default_collate([leaf.image for leaf in leaves])
    groups: dict[tuple[int, Shape], list[int]] = {}
    for at, leaf in enumerate(leaves):
        if form_of(leaf.image) != _lowered(ways, leaf.place).entry:
            raise Unknown("an image is of another kind than those that its pipeline was read with")
        groups.setdefault((leaf.place, shape_of(leaf.image)), []).append(at)
    if len(groups) == 1 and leaves[0].numbers is None:
        images = stack([leaf.image for leaf in leaves])
        return _finished(first, images, first.draw(Shape(*images.shape[1:]), len(images)))
    if leaves[0].numbers is None:
        with Words() as words:
            for leaf in leaves:
                leaf.numbers = _lowered(ways, leaf.place).row(shape_of(leaf.image), words)
    rows: list[Any] = [None] * len(leaves)
    for (place, shape), mine in groups.items():
        lowered = _lowered(ways, place)
        images = stack([leaves[at].image for at in mine])
        numbers = lowered.together([leaves[at].numbers or [] for at in mine], shape)
        for at, row in zip(mine, _finished(lowered, images, numbers), strict=True):
            rows[at] = row
    return default_collate(rows)


def _lowered(ways: Sequence[Way], place: int) -> Lowered:
    found = ways[place].lowered
    if found is None:
        raise LookupError(f"pipeline {place} was not lowered")
    return found


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def gathered(ways: Sequence[Way], store: Store, rows: Tensor, to_host: Callable[[Tensor], Tensor] = as_it_is) -> Any:
    """The batch of kept samples with which nothing is left to do one by one. ``to_host`` takes what was made where the store is."""
    columns = store.gather(rows)

    def finish(cells: Sequence[Cell], *, collate_fn_map: Any = None) -> Tensor:
        cell, column = cells[0], columns[cells[0].column]
        lowered = ways[cell.place].lowered if cell.place is not None else None
        if lowered is None:
            return to_host(column)
        images = column if cell.kind != "array" else column.unsqueeze(1) if column.dim() == 3 else column.permute(0, 3, 1, 2)
        numbers = lowered.draw(Shape(*images.shape[1:]), len(images))
        batch = lowered.run(images, numbers)
        return to_host(batch) if not lowered.tail else _after(lowered, batch.cpu())

    return collate([store.template], collate_fn_map={Cell: finish, **default_collate_fn_map})


def _finished(lowered: Lowered, images: Tensor, numbers: Sequence[Any]) -> Any:
    batch = lowered.run(images, numbers)
    return _after(lowered, batch) if lowered.tail else batch


def _after(lowered: Lowered, batch: Tensor) -> Any:
    """What stays with the single sample, behind the operations."""
    rows, before = list(batch.unbind()), states()
    for step in lowered.tail:
        rows = [step(row) for row in rows]
    if not same_states(before, states()):
        raise Unknown("a transform behind what was done to the batch draws random numbers")
    return default_collate(rows)
