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
from flatout.data.images import form_of, stack
from flatout.data.operation import NotBatchable

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
    if cell.kind == "pil" and all(
        type(v) is type(first) and v.mode == cell.detail and v.size == first.size and not v.info
        for v in values
    ):
        kind, tensor, detail = encode(first)
        if (kind, tuple(tensor.shape), detail) == (cell.kind, cell.shape, cell.detail):
            return stack(values)
    tensors = []
    for value in values:
        kind, tensor, detail = encode(value)
        if (kind, tensor.dtype, tuple(tensor.shape), detail) != (
            cell.kind,
            cell.dtype,
            cell.shape,
            cell.detail,
        ):
            raise NotBatchable("samples differ in size or type")
        tensors.append(tensor)
    return torch.stack(tensors)


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

    def move_to(self, device: torch.device) -> None:
        """Move the columns to a device. All rows must be filled."""
        self.columns = [column.to(device) for column in self.columns]

    def holds(self, index: int, sample: object) -> bool:
        """Whether the row equals this sample, bit for bit."""
        try:
            columns = self._encode([sample])
        except NotBatchable:
            return False
        return all(
            same_bits(column[index].cpu(), values[0])
            for column, values in zip(self.columns, columns, strict=True)
        )

    def gather(self, indices: Tensor) -> list[Tensor]:
        """The rows [B, ...] of each column, on the device of the columns."""
        device = self.columns[0].device if self.columns else indices.device
        indices = indices.to(device, non_blocking=True)
        return [column.index_select(0, indices) for column in self.columns]

    def samples(self, indices: Tensor) -> list[Any]:
        """The samples in their original form."""
        gather_batch = self.gather(indices)

        def sample(row: int) -> Any:
            return map_values(
                self.template,
                lambda cell: (
                    self._decode(cell, gather_batch[cell.column][row]) if type(cell) is Cell else cell
                ),
            )

        return [sample(row) for row in range(len(indices))]

    @staticmethod
    def _decode(cell: Cell, row: Tensor) -> Any:
        value: Any = row
        if cell.kind == "number":
            value = row.item()
        elif cell.kind == "array":
            value = row.numpy()
        elif cell.kind == "scalar":
            value = row.numpy()[()]
        elif cell.kind == "pil":
            from PIL import Image

            value = Image.fromarray(
                row[0].numpy() if len(row) == 1 else row.permute(1, 2, 0).contiguous().numpy()
            )
        return value
