"""Computes deferred images: batch operations on all images of a pipeline, then its single-image steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.data.images import stack
from flatout.data.intercept import recording
from flatout.data.journal import CallDraws, numbers_of
from flatout.data.lowering import Lowered
from flatout.data.operation import ImageForm, ImageShape, NotBatchable
from flatout.data.pipelines import TransformPipeline
from flatout.data.streams import same_states, states


class DeferredWork:
    """One image with pending operations.

    ``pixels`` is a tensor, an array, or the bytes of a PIL image. ``shape`` is its shape, ``out`` the
    result's.
    """

    __slots__ = ("certain", "draws", "form", "out", "pipeline", "pixels", "recorder", "shape", "turn", "used")

    def __init__(
        self,
        recorder: Any,
        pipeline: TransformPipeline,
        pixels: Any,
        shape: ImageShape,
        out: ImageShape,
        draws: tuple[CallDraws, ...],
        turn: int = 0,
    ) -> None:
        lowered = _lowered(pipeline)
        self.recorder = recorder
        self.pipeline = pipeline
        self.pixels = pixels
        self.shape = shape
        self.out = out
        self.draws = draws
        self.turn = turn  # index of the call within its sample
        self.form: ImageForm = lowered.exit
        self.certain = not lowered.tail
        self.used = False  # whether it entered a batch or was accessed


def batch_of(works: Sequence[DeferredWork]) -> Tensor | None:
    """Return the images [B, C, H, W] if all works share pipeline and shape without single-image steps."""
    first = works[0]
    if _lowered(first.pipeline).tail or any(
        work.pipeline is not first.pipeline or work.shape != first.shape for work in works
    ):
        return None
    return _run(works)


def rows_of(works: Sequence[DeferredWork]) -> list[Any]:
    """Return the images [C, H, W] in the order of the works. They may share the memory of a batch."""
    groups: dict[tuple[int, ImageShape], list[int]] = {}
    for number, work in enumerate(works):
        groups.setdefault((work.pipeline.number, work.shape), []).append(number)
    rows: list[Any] = [None] * len(works)
    for mine in groups.values():
        group = [works[number] for number in mine]
        for number, row in zip(mine, after(_lowered(group[0].pipeline), _run(group)), strict=True):
            rows[number] = row
    return rows


def _run(works: Sequence[DeferredWork]) -> Tensor:
    numbers = [
        columns for part in zip(*(work.draws for work in works), strict=True) for columns in numbers_of(part)
    ]
    return _lowered(works[0].pipeline).run(stack([work.pixels for work in works], works[0].shape), numbers)


def after(lowered: Lowered, batch: Tensor) -> list[Any]:
    """Return the rows of a batch after the single-image steps that follow the operations."""
    rows: list[Any] = list(batch.unbind())
    if not lowered.tail:
        return rows
    before = states()
    with recording(None):
        for step in lowered.tail:
            rows = [step(row) for row in rows]
    if not same_states(before, states()):
        raise NotBatchable("a transform after the batched ones draws random numbers")
    return rows


def _lowered(pipeline: TransformPipeline) -> Lowered:
    if pipeline.lowered is None:
        raise LookupError(f"the steps of {pipeline.name} run on single images")
    return pipeline.lowered


def finished(work: DeferredWork, row: Tensor) -> Any:
    """Return the image as in a plain run, with its own memory. Raises NotBatchable if it is not a tensor."""
    if work.form.kind == "pil":
        from PIL import Image

        pixels = row[0] if len(row) == 1 and work.form.mode == "L" else row.permute(1, 2, 0)
        return Image.fromarray(pixels.contiguous().numpy())
    if not isinstance(row, Tensor):
        raise NotBatchable(f"a transform of {work.pipeline.name} now returns a {type(row).__name__}")
    plain = row.as_subclass(Tensor)
    return (
        plain.permute(1, 2, 0).clone(memory_format=torch.contiguous_format).permute(2, 0, 1)
        if work.pipeline.permuted
        else plain.clone()
    )
