"""Kept samples in columns: one column for each number, tensor or image of a sample, one row for each sample.

A batch is a gather in each column, with the same result as torch's default collation of the samples. Columns
are in shared memory if loader workers fill them, or in a memory-mapped file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.data.batch_comparison import same_bits
from flatout.data.deferred import access, deferred_image, is_deferred, materialize
from flatout.data.deferring import BatchRecorder
from flatout.data.device import CopyStream
from flatout.data.images import form_of, shape_of, stack
from flatout.data.lowering import name_of
from flatout.data.operation import ImageShape, NotBatchable
from flatout.data.pipelines import DeferredWork, OriginalCall, Pipelines, TransformPipeline, recording

MAX_DEPTH = 6
TESTED_SAMPLES = 8  # samples that are fetched twice before any is kept
SCALARS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Constant:
    """A part of a sample that must be the same in all samples and needs no column."""

    number: int = 0


@dataclass(frozen=True)
class Cell:
    """Stands for the value of a column in the template of a sample."""

    column: int
    kind: str  # tensor, array, number, scalar (numpy's) or pil (as [C, H, W])
    dtype: torch.dtype
    shape: tuple[int, ...]
    detail: Any = None  # the type of a number, the mode of a PIL image

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def fits(self, kind: str, tensor: Tensor, detail: Any) -> bool:
        return (kind, tensor.dtype, tensor.shape, detail) == (self.kind, self.dtype, self.shape, self.detail)


def template_of(sample: object) -> tuple[Any, list[Cell]]:
    """The sample with cells as values. Raises NotBatchable if a value cannot be kept exactly."""
    cells: list[Cell] = []

    def cell(value: object) -> Any:
        if isinstance(value, Constant):
            return value
        kind, tensor, detail = encode(value)
        cells.append(Cell(len(cells), kind, tensor.dtype, tuple(tensor.shape), detail))
        return cells[-1]

    return map_values(sample, cell), cells


def encode(value: Any) -> tuple[str, Tensor, Any]:
    """The kind, the value as a tensor, and the detail needed to rebuild it."""
    if type(value) in SCALARS:
        try:
            return "number", torch.tensor(value, dtype=SCALARS[type(value)]), type(value)
        except (OverflowError, RuntimeError, ValueError) as error:
            raise NotBatchable(f"a sample holds the number {value}, which cannot be kept") from error
    if (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_quantized
    ):
        return "tensor", value, None
    module, name = type(value).__module__.split(".")[0], type(value).__name__
    if module == "numpy" and (name == "ndarray" or value.ndim == 0):
        import numpy

        try:
            return ("array" if name == "ndarray" else "scalar"), torch.from_numpy(numpy.array(value)), None
        except TypeError as error:
            raise NotBatchable(f"a sample holds an array of {value.dtype}, which cannot be kept") from error
    # An image that is still bound to its file has data beyond its pixels.
    form = form_of(value)
    if (
        form is not None
        and form.kind == "pil"
        and type(value).__module__ == "PIL.Image"
        and name == "Image"
        and not value.info
    ):
        return "pil", stack([value])[0], value.mode
    raise NotBatchable(f"a sample holds a {name}, which cannot be kept")


def map_values(thing: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """The same structure of tuples, lists and dictionaries with changed values."""
    if depth > MAX_DEPTH:
        raise NotBatchable("a sample is nested too deeply")
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(map_values(part, change, depth + 1) for part in thing))
    if type(thing) in (tuple, list):
        return type(thing)(map_values(part, change, depth + 1) for part in thing)
    if type(thing) is dict:
        return {key: map_values(part, change, depth + 1) for key, part in thing.items()}
    return change(thing)


def _match(template: Any, sample: Any, values: list[Any]) -> None:
    kind = type(template)
    if kind is Cell:
        if isinstance(sample, Constant):
            raise NotBatchable("samples come through different pipelines")
        values.append(sample)
        return
    if isinstance(template, Constant):
        if sample != template:
            raise NotBatchable("samples come through different pipelines")
        return
    if (
        type(sample) is not kind
        or len(sample) != len(template)
        or (kind is dict and sample.keys() != template.keys())
    ):
        raise NotBatchable("samples differ in their structure")
    for key in template if kind is dict else range(len(template)):
        _match(template[key], sample[key], values)


def _column_values(cell: Cell, values: Sequence[Any]) -> Tensor:
    first = values[0]
    if cell.kind == "number" and all(type(value) is cell.detail for value in values):
        return torch.tensor(values, dtype=cell.dtype)
    if (
        cell.kind == "pil"
        and all(
            type(v) is type(first) and v.mode == cell.detail and v.size == first.size and not v.info
            for v in values
        )
        and cell.fits(*encode(first))
    ):
        return stack(values)
    encoded = [encode(value) for value in values]
    if not all(cell.fits(*each) for each in encoded):
        raise NotBatchable("samples differ in size or type")
    return torch.stack([tensor for _, tensor, _ in encoded])


class Store:
    """Rows for the first ``rows`` samples of a data set.

    Raises NotBatchable if samples like the given one cannot be kept.
    """

    def __init__(
        self, sample: object, length: int, budget_bytes: int, shared: bool, folder: str | None = None
    ) -> None:
        self.template, self.cells = template_of(sample)
        self.row_bytes = sum(cell.row_bytes for cell in self.cells) + 1
        self.bytes_of_all = length * self.row_bytes
        on_disk = folder is not None and self.bytes_of_all > budget_bytes
        self.rows = length if on_disk else min(length, budget_bytes // self.row_bytes)
        self.bytes = 0 if on_disk else self.rows * self.row_bytes
        self.columns = [self._column(cell, shared, folder if on_disk else None) for cell in self.cells]
        self.filled = torch.zeros(self.rows, dtype=torch.bool)
        if shared:
            self.filled.share_memory_()
        self.length = length
        self._stream = CopyStream(torch.device("cpu"))
        self._full = False

    def _column(self, cell: Cell, shared: bool, folder: str | None) -> Tensor:
        shape = (self.rows, *cell.shape)
        count = torch.Size(shape).numel()
        if folder is not None and count:
            # mapped, so its name may be removed
            with tempfile.NamedTemporaryFile(dir=folder, prefix="flatout-", suffix=".column") as file:
                file.truncate(count * cell.dtype.itemsize)
                return torch.from_file(file.name, shared=True, size=count, dtype=cell.dtype).view(shape)
        column = torch.empty(shape, dtype=cell.dtype)
        return column.share_memory_() if shared else column

    @property
    def full(self) -> bool:
        """Whether every sample is kept."""
        self._full = self._full or (self.rows == self.length and bool(self.filled.all()))
        return self._full

    def put(self, indices: Sequence[int], samples: Sequence[Any]) -> None:
        """Keep samples. Raises NotBatchable if one of them differs in structure from the first."""
        index = torch.tensor(indices)
        for column, values in zip(self.columns, self._encode(samples), strict=True):
            column[index] = values
        self.filled[index] = True

    def _encode(self, samples: Sequence[Any]) -> list[Tensor]:
        rows: list[list[Any]] = []
        for sample in samples:
            rows.append([])
            _match(self.template, sample, rows[-1])
        return [_column_values(cell, [row[number] for row in rows]) for number, cell in enumerate(self.cells)]

    def move_to(self, stream: CopyStream) -> None:
        """Move the columns to the device of a stream, which reads them. All rows must be filled."""
        self.columns, self._stream = [column.to(stream.device) for column in self.columns], stream

    def holds(self, index: int, sample: object) -> bool:
        """Whether the row equals this sample, bit for bit."""
        try:
            columns = self._encode([sample])
        except NotBatchable:
            return False
        with self._stream.open():  # waits for this stream and not for the script's work
            return all(
                same_bits(column[index].cpu(), values[0])
                for column, values in zip(self.columns, columns, strict=True)
            )

    def gather(self, indices: Tensor) -> list[Tensor]:
        """The rows [B, ...] of each column. Indices and columns are on one device."""
        return [column.index_select(0, indices) for column in self.columns]

    def samples(self, indices: Tensor) -> list[Any]:
        """The samples in their original form."""
        columns = self.gather(indices)

        def sample(row: int) -> Any:
            return map_values(self.template, lambda cell: self._decode(cell, columns, row))

        return [sample(row) for row in range(len(indices))]

    @staticmethod
    def _decode(cell: Any, columns: Sequence[Tensor], row: int) -> Any:
        if type(cell) is not Cell:
            return cell
        value = columns[cell.column][row]
        if cell.kind == "number":
            return value.item()
        if cell.kind in ("array", "scalar"):
            return value.numpy() if cell.kind == "array" else value.numpy()[()]
        if cell.kind != "pil":
            return value
        from PIL import Image

        return Image.fromarray(
            value[0].numpy() if len(value) == 1 else value.permute(1, 2, 0).contiguous().numpy()
        )


# Kept samples: images before any random transform, and the calls that remain.
#
# A kept sample is a tuple: the sample with a `CallResult` for each image, the source images, and the calls in the
# order of the data set's code. Replaying it makes these calls again, so every random number is drawn in the
# plain order.


class CallResult(Constant):
    """Stands in a kept sample for the result of a call."""


@dataclass(frozen=True)
class ReplayProgram(Constant):
    """The calls of one sample: the number of a pipeline, and the source or earlier call that it starts from.

    Earlier calls count from -1 downwards.
    """

    calls: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, eq=False)
class UnreadResult:
    """Stands for the result of an unread transform while its sample is kept. It can only be passed on."""

    pipeline: TransformPipeline
    call_index: int


class SampleRecorder:
    """The recorder of one sample to keep. It draws nothing and returns images that no code may access."""

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines
        self._sources: list[Any] = []
        self._source_numbers: dict[
            tuple[int, ...], int
        ] = {}  # an image and its completed steps -> its source
        self._images: list[Any] = []  # so that no id is reused
        self._calls: list[tuple[int, int]] = []
        self._why_not = ""

    def call(self, transform: object, image: object, original: OriginalCall) -> Any:
        parent, call_index = _origin(image)
        pipeline = self._pipelines.of(parent, transform)
        if pipeline is None:
            if parent is not None:
                self._why_not = (
                    f"{type(transform).__name__} accesses an image that is computed only with its batch"
                )
            with recording(None):
                return original(transform, image)
        with recording(None):
            return (
                self._defer_call(pipeline, -1 - call_index)
                if parent is not None
                else self._start_call(pipeline, image)
            )

    @property
    def returned_placeholder(self) -> bool:
        """Whether any call returned an image that no code may access."""
        return bool(self._calls)

    def before_seeding(self) -> None:
        self._why_not = "the data set seeds torch's random generator itself"

    def on_access(self, image: object) -> None:
        """Record that the sample depends on an image whose random numbers are drawn with its batch."""
        work: DeferredWork = vars(image)["pending"]
        self._why_not = f"the data set looks at the images that {work.pipeline.name} returns"
        value = work.pixels
        for step in work.pipeline.steps[work.pipeline.kept :]:
            value = step(value)
        materialize(image, value)

    def stack(self, images: Sequence[Any]) -> Tensor | None:
        access(images)
        return None

    def sample(self, sample: object) -> tuple[Any, tuple[Any, ...], ReplayProgram]:
        """The sample in its kept form. Raises NotBatchable if it cannot be kept."""
        if self._why_not:
            raise NotBatchable(self._why_not)
        results = 0

        def placeholder(value: object) -> Any:
            nonlocal results
            pipeline, call_index = _origin(value)
            results += pipeline is not None
            return value if pipeline is None else CallResult(call_index)

        structure = map_values(sample, placeholder)
        if not results and self._calls:
            raise NotBatchable("the data set uses the results of its transforms in another way")
        return structure, tuple(self._sources), ReplayProgram(calls=tuple(self._calls))

    def _start_call(self, pipeline: TransformPipeline, image: object) -> Any:
        lowered = pipeline.lowered
        key = id(image), *map(id, pipeline.steps[: pipeline.kept])
        if key not in self._source_numbers:
            self._images.append(image)
            for step in pipeline.steps[: pipeline.kept]:
                image = step(image)
            if lowered is not None and pipeline.kept == pipeline.start and form_of(image) != lowered.entry:
                self._why_not = "an image differs in kind from those that its pipeline was read with"
            if all(map(_reads_only_pixels, pipeline.steps[pipeline.kept :])):
                image = _without_metadata(image)
            self._source_numbers[key] = len(self._sources)
            self._sources.append(image)
        return self._defer_call(pipeline, self._source_numbers[key])

    def _defer_call(self, pipeline: TransformPipeline, start: int) -> Any:
        call_index = len(self._calls)
        self._calls.append((pipeline.number, start))
        if pipeline.lowered is None or pipeline.kept < pipeline.start:
            return UnreadResult(pipeline, call_index)
        source = self._sources[self._source_number(start)]
        shape = shape_of(source)
        out_shape: ImageShape | None = shape
        for link in pipeline.chain:
            out_shape = link.out_shape(out_shape) if out_shape is not None else None
        if out_shape is None:
            self._why_not = f"torchvision rejects an image of {tuple(shape)}"
            return UnreadResult(pipeline, call_index)
        return deferred_image(DeferredWork(self, pipeline, source, shape, out_shape, (), call_index))

    def _source_number(self, start: int) -> int:
        while start < 0:
            start = self._calls[-1 - start][1]
        return start


def _origin(value: object) -> tuple[TransformPipeline | None, int]:
    """The pipeline and index of the remaining call behind a value; None for every other value."""
    if type(value) is UnreadResult:
        return value.pipeline, value.call_index
    if is_deferred(value):
        work: DeferredWork = vars(value)["pending"]
        return work.pipeline, work.call_index
    return None, 0


def _reads_only_pixels(step: object) -> bool:
    inner = getattr(step, "transforms", ())
    return name_of(step)[3:] not in ("", "Lambda") and all(
        map(_reads_only_pixels, inner if isinstance(inner, (list, tuple)) else ())
    )


def _without_metadata(image: Any) -> Any:
    if hasattr(image, "getbands") and "transparency" not in image.info:
        image = image.copy()
        image.info = {}
    return image


def replay_sample(
    kept: tuple[Any, tuple[Any, ...], ReplayProgram], pipelines: Pipelines, recorder: BatchRecorder
) -> Any:
    """Rebuild a kept sample by making its calls again."""
    structure, sources, program = kept
    results: list[Any] = []
    with recording(None):
        for number, start in program.calls:
            pipeline = pipelines.entries[number]
            image, done_steps = (sources[start], pipeline.kept) if start >= 0 else (results[-1 - start], 0)
            results.append(recorder.resume(pipeline, image, done_steps))
    return map_values(structure, lambda value: results[value.number] if type(value) is CallResult else value)
