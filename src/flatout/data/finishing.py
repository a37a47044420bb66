"""Computes deferred images: batch operations on all images of a pipeline, then its single-image steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class DeferredWork:
    """One image with pending operations.

    ``pixels`` is a tensor, an array, or the bytes of a PIL image. ``shape`` is its shape, ``out_shape`` the
    result's.
    """

    recorder: Any
    pipeline: TransformPipeline
    pixels: Any
    shape: ImageShape
    out_shape: ImageShape
    draws: tuple[CallDraws, ...]
    call_index: int = 0  # index of the call within its sample
    used: bool = False  # whether it entered a batch or was accessed
    form: ImageForm = field(init=False)
    metadata_known: bool = field(init=False)

    def __post_init__(self) -> None:
        lowered = _lowered(self.pipeline)
        self.form = lowered.exit
        self.metadata_known = not lowered.tail


def batch_of(works: Sequence[DeferredWork]) -> Tensor | None:
    """The images [B, C, H, W] if all works share pipeline and shape without single-image steps."""
    first = works[0]
    if _lowered(first.pipeline).tail or any(
        work.pipeline is not first.pipeline or work.shape != first.shape for work in works
    ):
        return None
    return _run(works)


def rows_of(works: Sequence[DeferredWork]) -> list[Any]:
    """The images [C, H, W] in the order of the works. They may share the memory of a batch."""
    groups: dict[tuple[int, ImageShape], list[int]] = {}
    for number, work in enumerate(works):
        groups.setdefault((work.pipeline.number, work.shape), []).append(number)
    rows: list[Any] = [None] * len(works)
    for members in groups.values():
        group = [works[number] for number in members]
        for number, row in zip(members, apply_tail(_lowered(group[0].pipeline), _run(group)), strict=True):
            rows[number] = row
    return rows


def _run(works: Sequence[DeferredWork]) -> Tensor:
    numbers = [
        columns
        for call_draws in zip(*(work.draws for work in works), strict=True)
        for columns in numbers_of(call_draws)
    ]
    return _lowered(works[0].pipeline).run(stack([work.pixels for work in works], works[0].shape), numbers)


def apply_tail(lowered: Lowered, batch: Tensor) -> list[Any]:
    """The rows of a batch after the single-image steps that follow the operations."""
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


def finished_image(work: DeferredWork, row: Tensor) -> Any:
    """The image as in a plain run, with its own memory. Raises NotBatchable if it is not a tensor."""
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
