"""Batches of kept samples without single-image steps: gather each column, then run the batch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from flatout.data.device import as_it_is
from flatout.data.draws import BulkNumbers, columns
from flatout.data.finishing import after
from flatout.data.kept import CallResult, ReplayProgram
from flatout.data.operation import ImageShape, listed_draws, row_of, rows_together
from flatout.data.pipelines import Pipelines
from flatout.data.store import Cell, Store

Numbers = list[Sequence[Any]]


def can_be_gathered(pipelines: Pipelines, store: Store) -> bool:
    """Return whether all remaining calls of a kept sample run on batches."""
    called = [pipelines.found[number] for number, _ in program_of(store).calls]
    return all(
        pipeline.lowered is not None
        and not pipeline.off
        and (pipeline.parent is not None or pipeline.kept == pipeline.start)
        for pipeline in called
    )


def program_of(store: Store) -> ReplayProgram:
    program: ReplayProgram = store.template[2]
    return program


def gathered(
    pipelines: Pipelines,
    store: Store,
    rows: Tensor,
    to_host: Callable[[Tensor], Tensor] = as_it_is,
    to_device: Callable[[Tensor], Tensor] = as_it_is,
) -> Any:
    """Return the batch of kept samples, as torch's default collation would make it.

    ``to_device`` moves the gathered columns to where they are transformed, and ``to_host`` moves results
    back.
    """
    columns = [to_device(column) for column in store.gather(rows)]
    structure, sources, program = store.template
    entering = [_images(columns[cell.column], cell) for cell in sources]
    numbers = _drawn(pipelines, program, entering, len(rows))

    def finish(results: Sequence[CallResult], *, collate_fn_map: object = None) -> Any:
        turn = results[0].number
        pipeline = pipelines.found[program.calls[turn][0]]
        if pipeline.lowered is None:
            raise LookupError(f"the steps of {pipeline.name} run on single images")
        batch = pipeline.lowered.run(entering[_source(program, turn)], numbers[turn])
        if not pipeline.lowered.tail:
            return to_host(batch)
        return collate(after(pipeline.lowered, batch.cpu()), collate_fn_map=default_collate_fn_map)

    def copied(cells: Sequence[Cell], *, collate_fn_map: object = None) -> Tensor:
        return to_host(columns[cells[0].column])

    return collate([structure], collate_fn_map={Cell: copied, CallResult: finish, **default_collate_fn_map})


def _images(column: Tensor, cell: Cell) -> Tensor:
    """Return the images as [B, C, H, W]."""
    return (
        column
        if cell.kind != "array"
        else column.unsqueeze(1)
        if column.dim() == 3
        else column.permute(0, 3, 1, 2)
    )


def _source(program: ReplayProgram, turn: int) -> int:
    start = program.calls[turn][1]
    return start if start >= 0 else _source(program, -1 - start)


def _drawn(
    pipelines: Pipelines, program: ReplayProgram, entering: Sequence[Tensor], count: int
) -> list[Numbers]:
    """Return the numbers of each call and of the calls before it, drawn call by call, sample by sample."""
    called = [pipelines.found[number] for number, _ in program.calls]
    shapes: list[ImageShape] = []  # before each call
    for _, start in program.calls:
        before = None if start >= 0 else called[-1 - start].out(shapes[-1 - start])
        shapes.append(before or ImageShape(*entering[start].shape[1:]))
    listed = [listed_draws(pipeline.own, shape) for pipeline, shape in zip(called, shapes, strict=True)]
    if any(each is None for each in listed):
        with BulkNumbers() as words:
            rows = [
                [row_of(pipeline.own, shape, words) for pipeline, shape in zip(called, shapes, strict=True)]
                for _ in range(count)
            ]
        mine = [
            rows_together(pipeline.own, [row[turn] for row in rows], shape)
            for turn, (pipeline, shape) in enumerate(zip(called, shapes, strict=True))
        ]
    else:
        drawn = iter(
            columns([kind for operations in listed for each in operations or () for kind in each], count)
        )
        mine = [[[next(drawn) for _ in each] for each in operations or ()] for operations in listed]
    collected: list[Numbers] = []
    for numbers, (_, start) in zip(mine, program.calls, strict=True):
        collected.append([*(collected[-1 - start] if start < 0 else ()), *numbers])
    return collected
