"""Batches of kept samples without single-image steps: gather each column, then run the batch operations."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from flatout.data.device import identity
from flatout.data.draws import BulkNumberSource, draw_columns
from flatout.data.finishing import apply_tail
from flatout.data.kept import CallResult, ReplayProgram
from flatout.data.operation import ImageShape, draw_row, listed_draws, rows_to_columns
from flatout.data.pipelines import Pipelines
from flatout.data.store import Cell, Store

Numbers = list[Sequence[Any]]


def can_gather(pipelines: Pipelines, store: Store) -> bool:
    """Whether all remaining calls of a kept sample run on batches."""
    of_calls = [pipelines.entries[number] for number, _ in program_of(store).calls]
    return all(
        pipeline.lowered is not None
        and not pipeline.disabled
        and (pipeline.parent is not None or pipeline.kept == pipeline.start)
        for pipeline in of_calls
    )


def program_of(store: Store) -> ReplayProgram:
    program: ReplayProgram = store.template[2]
    return program


def gather_batch(
    pipelines: Pipelines,
    store: Store,
    rows: Tensor,
    to_host: Callable[[Tensor], Tensor] = identity,
    to_device: Callable[[Tensor], Tensor] = identity,
) -> Any:
    """The batch of kept samples, as torch's default collation would make it.

    ``to_device`` moves the gathered columns to where they are transformed, and ``to_host`` moves results
    back.
    """
    columns = [to_device(column) for column in store.gather(rows)]
    structure, sources, program = store.template
    inputs = [_images(columns[cell.column], cell) for cell in sources]
    numbers = _draw_numbers(pipelines, program, inputs, len(rows))

    def collate_results(results: Sequence[CallResult], *, collate_fn_map: object = None) -> Any:
        call_index = results[0].number
        pipeline = pipelines.entries[program.calls[call_index][0]]
        if pipeline.lowered is None:
            raise LookupError(f"the steps of {pipeline.name} run on single images")
        batch = pipeline.lowered.run(inputs[_source(program, call_index)], numbers[call_index])
        if not pipeline.lowered.tail:
            return to_host(batch)
        return collate(apply_tail(pipeline.lowered, batch.cpu()), collate_fn_map=default_collate_fn_map)

    def collate_cells(cells: Sequence[Cell], *, collate_fn_map: object = None) -> Tensor:
        return to_host(columns[cells[0].column])

    return collate(
        [structure],
        collate_fn_map={Cell: collate_cells, CallResult: collate_results, **default_collate_fn_map},
    )


def _images(column: Tensor, cell: Cell) -> Tensor:
    return (
        column
        if cell.kind != "array"
        else column.unsqueeze(1)
        if column.dim() == 3
        else column.permute(0, 3, 1, 2)
    )


def _source(program: ReplayProgram, call_index: int) -> int:
    start = program.calls[call_index][1]
    return start if start >= 0 else _source(program, -1 - start)


def _draw_numbers(
    pipelines: Pipelines, program: ReplayProgram, inputs: Sequence[Tensor], count: int
) -> list[Numbers]:
    of_calls = [pipelines.entries[number] for number, _ in program.calls]
    shapes: list[ImageShape] = []  # before each call
    for _, start in program.calls:
        before = None if start >= 0 else of_calls[-1 - start].out_shape(shapes[-1 - start])
        shapes.append(before or ImageShape(*inputs[start].shape[1:]))
    listed = [
        listed_draws(pipeline.call_operations, shape)
        for pipeline, shape in zip(of_calls, shapes, strict=True)
    ]
    if any(draws is None for draws in listed):
        with BulkNumberSource() as source:
            rows = [
                [
                    draw_row(pipeline.call_operations, shape, source)
                    for pipeline, shape in zip(of_calls, shapes, strict=True)
                ]
                for _ in range(count)
            ]
        call_numbers = [
            rows_to_columns(pipeline.call_operations, [row[call_index] for row in rows], shape)
            for call_index, (pipeline, shape) in enumerate(zip(of_calls, shapes, strict=True))
        ]
    else:
        drawn = iter(
            draw_columns(
                [kind for operations in listed for draws in operations or () for kind in draws], count
            )
        )
        call_numbers = [[[next(drawn) for _ in draws] for draws in operations or ()] for operations in listed]
    collected: list[Numbers] = []
    for numbers, (_, start) in zip(call_numbers, program.calls, strict=True):
        collected.append([*(collected[-1 - start] if start < 0 else ()), *numbers])
    return collected
