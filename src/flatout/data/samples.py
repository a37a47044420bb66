"""The kept samples of one data set, filled on demand and monitored for changes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from flatout.data.changes import DatasetState
from flatout.data.device import ResidentDevice
from flatout.data.draws import BulkNumberSource
from flatout.data.inspection import inspection_copy
from flatout.data.keeping import CacheOptions, tested_store
from flatout.data.operation import ImageShape, NotBatchable, draw_listed, draw_row, rows_to_columns
from flatout.data.pipelines import Pipelines, apply_tail, lowered_of, recording
from flatout.data.source import fetch_samples
from flatout.data.store import CallResult, Cell, ReplayProgram, SampleRecorder, Store
from flatout.data.streams import restore_states, same_states, states

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
    pipelines: Pipelines, store: Store, rows: Tensor, device: ResidentDevice | None = None
) -> Any:
    """The batch of kept samples, as torch's default collation would make it, made on the host or ``device``."""
    structure, sources, program = store.template
    shapes = [ImageShape(*_images(store.columns[cell.column], cell).shape[1:]) for cell in sources]
    numbers = _draw_numbers(pipelines, program, shapes, len(rows))
    if device is None:
        columns = store.gather(rows)
    else:
        sent = iter(device.stream.send([[rows], *(drawn for call in numbers for drawn in call)]))
        (sent_rows,) = next(sent)
        numbers = [[next(sent) for _ in call] for call in numbers]
        columns = store.gather(rows if device.on_host else sent_rows)
        if device.on_host:
            columns = [*map(device.stream.to_device, columns)]
    inputs = [_images(columns[cell.column], cell) for cell in sources]
    finish: Callable[[Tensor], Tensor] = (lambda tensor: tensor) if device is None else device.to_host

    def collate_results(results: Sequence[CallResult], *, collate_fn_map: object = None) -> Any:
        call_index = results[0].number
        lowered = lowered_of(pipelines.entries[program.calls[call_index][0]])
        batch = lowered.run(inputs[_source(program, call_index)], numbers[call_index])
        if not lowered.tail:
            return finish(batch)
        return collate(apply_tail(lowered, batch.cpu()), collate_fn_map=default_collate_fn_map)

    def collate_cells(cells: Sequence[Cell], *, collate_fn_map: object = None) -> Tensor:
        return finish(columns[cells[0].column])

    return collate(
        [structure],
        collate_fn_map={Cell: collate_cells, CallResult: collate_results, **default_collate_fn_map},
    )


def _images(column: Tensor, cell: Cell) -> Tensor:
    if cell.kind != "array":
        return column
    return column.unsqueeze(1) if column.dim() == 3 else column.permute(0, 3, 1, 2)


def _source(program: ReplayProgram, call_index: int) -> int:
    start = program.calls[call_index][1]
    return start if start >= 0 else _source(program, -1 - start)


def _draw_numbers(
    pipelines: Pipelines, program: ReplayProgram, sources: Sequence[ImageShape], count: int
) -> list[Numbers]:
    of_calls = [pipelines.entries[number] for number, _ in program.calls]
    shapes: list[ImageShape] = []  # before each call
    for _, start in program.calls:
        before = None if start >= 0 else of_calls[-1 - start].out_shape(shapes[-1 - start])
        shapes.append(before or sources[start])
    calls = [(pipeline.call_operations, shape) for pipeline, shape in zip(of_calls, shapes, strict=True)]
    call_numbers = draw_listed(calls, count)
    if call_numbers is None:
        with BulkNumberSource() as source:
            rows = [[draw_row(*call, source) for call in calls] for _ in range(count)]
        call_numbers = [
            rows_to_columns(operations, [row[index] for row in rows], shape)
            for index, (operations, shape) in enumerate(calls)
        ]
    collected: list[Numbers] = []
    for numbers, (_, start) in zip(call_numbers, program.calls, strict=True):
        collected.append([*(collected[-1 - start] if start < 0 else ()), *numbers])
    return collected


FETCH_SIZE = 256  # samples fetched together when all are kept ahead
ALWAYS_CHECKED_BATCHES = 64  # batches in which one kept sample is fetched again; later every 32nd
CHANGED = "samples are no longer kept: the script has changed its data set"


class KeptSamples:
    """Kept samples. Methods raise NotBatchable with the reason if samples may no longer be kept.

    With ``shared``, loader workers fill the same store. ``rngs`` holds the random generators of the data set.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: CacheOptions,
        pipelines: Pipelines,
        shared: bool,
        rngs: Sequence[Any],
    ) -> None:
        self.dataset = dataset
        self.pipelines = pipelines
        self.options = options
        self.rngs = rngs
        copy = inspection_copy(dataset)
        self.store: Store = tested_store(copy, lambda index: self._sample(copy, index), options, shared, rngs)
        self.dataset_state: DatasetState | None = DatasetState(dataset)
        self._ran_dataset_code = False  # changes during a fetch are made by the data set's own code
        self._batches = 0

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned worker, which reads the pipelines and its own data set again."""
        return {**vars(self), "pipelines": Pipelines(), "rngs": [], "dataset_state": None}

    def close(self) -> None:
        self.options.memory.remaining_bytes += self.store.bytes

    def fill_all(self) -> None:
        if self.options.shared_samples is None:
            self._fetch_missing()
        else:
            self.options.shared_samples.fill(self.store, self._holds, self._fetch_missing)
        self.record()

    def _fetch_missing(self) -> None:
        missing = (~self.store.filled).nonzero().flatten().tolist()
        for first in range(0, len(missing), FETCH_SIZE):
            self._fetch(missing[first : first + FETCH_SIZE], self.dataset, self.store.put)

    def rows(self, indices: Sequence[Any], dataset: Dataset) -> Tensor | None:
        """The rows of these samples, fetching missing ones; None if one of them has no row."""
        if self.dataset_state is not None and self.dataset_state.changed():
            raise NotBatchable(CHANGED)
        self._ran_dataset_code = True
        if {*map(type, indices)} != {int} or min(indices) < 0 or max(indices) >= self.store.rows:
            return None
        self._ran_dataset_code = False
        rows = torch.frombuffer(array("q", indices), dtype=torch.int64)
        if not self.store.full and (missing := rows[~self.store.filled[rows]].unique().tolist()):
            self._fetch(missing, dataset, self.store.put)
        self._batches += 1
        if self._batches <= ALWAYS_CHECKED_BATCHES or self._batches % 32 == 0:
            self._recheck(indices[self._batches % len(indices)], dataset)
        return rows

    def record(self) -> None:
        """Record the current state of the data set."""
        if self.dataset_state is not None:
            self.dataset_state.record()

    @property
    def has_changed(self) -> bool:
        """Whether the data set has changed, or may have, since samples were kept."""
        return self.dataset_state is None or self.dataset_state.changed()

    def adopt_pipelines(self, signature: object, pipelines: Pipelines) -> bool:
        """In a worker, return whether these pipelines have this signature and can replay the samples."""
        self.pipelines = pipelines
        return bool(pipelines.signature() == signature)

    def after_batch(self) -> None:
        if self._ran_dataset_code:
            self.record()

    def _sample(self, dataset: Dataset, index: int) -> Any:
        self._ran_dataset_code = True
        recorder = SampleRecorder(self.pipelines)
        try:
            with recording(recorder):
                sample = fetch_samples(dataset, [index])[0]
        except Exception as error:
            if recorder.returned_placeholder:  # the data set's code got an image that is not computed yet
                raise NotBatchable(
                    "the data set looks at images whose random numbers are drawn with their batch"
                ) from error
            raise
        return recorder.sample(sample)

    def _holds(self, index: int) -> bool:
        try:
            self._recheck(index, self.dataset)
        except NotBatchable:
            return False
        return True

    def _recheck(self, index: int, dataset: Dataset) -> None:
        def compare(indices: Sequence[int], samples: Sequence[Any]) -> None:
            if not self.store.holds(index, samples[0]):
                raise NotBatchable("one of them has changed")

        self._fetch([index], dataset, compare)

    def _fetch(
        self, indices: Sequence[int], dataset: Dataset, use: Callable[[Sequence[int], Sequence[Any]], None]
    ) -> None:
        before = states(self.rngs)
        try:
            samples = [self._sample(dataset, index) for index in indices]
            if not same_states(before, states(self.rngs)):
                raise NotBatchable("fetching a sample draws random numbers")
            use(indices, samples)
        except NotBatchable as why:
            restore_states(before)
            raise NotBatchable(f"samples are no longer kept: {why}") from why


def open_samples(
    dataset: Dataset,
    options: CacheOptions,
    pipelines: Pipelines,
    shared: bool,
    rngs: Sequence[Any],
    split_optional: bool,
) -> KeptSamples:
    """Open a store of samples with remaining calls, or (``split_optional``) as returned. Raises NotBatchable."""
    try:
        return KeptSamples(dataset, options, pipelines, shared, rngs)
    except NotBatchable:
        if not split_optional or not pipelines:
            raise
    pipelines.entries.clear()
    return KeptSamples(dataset, options, pipelines, shared, rngs)
