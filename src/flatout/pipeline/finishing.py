"""The last stretch of deferred images: the operations on all that came the same way, and what stays with the single image behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.pipeline.intercept import recording
from flatout.pipeline.journal import Draws, numbers_of
from flatout.pipeline.lowering import Lowered, stack
from flatout.pipeline.operation import Form, Shape, Unknown
from flatout.pipeline.pipelines import Pipeline
from flatout.pipeline.streams import same_states, states


class Work:
    """One image on which operations are left to do.

    ``pixels`` are a tensor, an array, or the bytes of a PIL image; ``shape`` is theirs, ``out`` that of the result.
    """

    __slots__ = ("certain", "draws", "form", "out", "pipeline", "pixels", "recorder", "shape", "turn", "used")

    def __init__(self, recorder: Any, pipeline: Pipeline, pixels: Any, shape: Shape, out: Shape, draws: tuple[Draws, ...], turn: int = 0) -> None:
        lowered = _lowered(pipeline)
        self.recorder = recorder
        self.pipeline = pipeline
        self.pixels = pixels
        self.shape = shape
        self.out = out
        self.draws = draws
        self.turn = turn  # which call of its sample it was
        self.form: Form = lowered.exit
        self.certain = not lowered.tail
        self.used = False  # whether it came into a batch, or was looked at


def batch_of(works: Sequence[Work]) -> Tensor | None:
    """The images [B, C, H, W] of works of one pipeline and shape, in their order; None where there are several, or steps left for each."""
    first = works[0]
    if _lowered(first.pipeline).tail or any(work.pipeline is not first.pipeline or work.shape != first.shape for work in works):
        return None
    return _run(works)


def rows_of(works: Sequence[Work]) -> list[Any]:
    """The images [C, H, W] one by one, in the order of the works. They may lie in one batch."""
    groups: dict[tuple[int, Shape], list[int]] = {}
    for at, work in enumerate(works):
        groups.setdefault((work.pipeline.number, work.shape), []).append(at)
    rows: list[Any] = [None] * len(works)
    for mine in groups.values():
        group = [works[at] for at in mine]
        for at, row in zip(mine, after(_lowered(group[0].pipeline), _run(group)), strict=True):
            rows[at] = row
    return rows


def _run(works: Sequence[Work]) -> Tensor:
    numbers = [each for part in zip(*(work.draws for work in works), strict=True) for each in numbers_of(part)]
    return _lowered(works[0].pipeline).run(stack([work.pixels for work in works], works[0].shape), numbers)


def after(lowered: Lowered, batch: Tensor) -> list[Any]:
    """The rows of a batch, with what stays with the single image behind the operations."""
    rows: list[Any] = list(batch.unbind())
    if not lowered.tail:
        return rows
    before = states()
    with recording(None):
        for step in lowered.tail:
            rows = [step(row) for row in rows]
    if not same_states(before, states()):
        raise Unknown("a transform behind what was done to the batch draws random numbers")
    return rows


def _lowered(pipeline: Pipeline) -> Lowered:
    if pipeline.lowered is None:
        raise LookupError(f"the steps of {pipeline.name} stay with the single image")
    return pipeline.lowered


def finished(work: Work, row: Tensor) -> Any:
    """The image as the program would have had it, in memory of its own. Raises Unknown where it is no tensor."""
    if work.form.kind == "pil":
        from PIL import Image

        pixels = row[0] if len(row) == 1 and work.form.mode == "L" else row.permute(1, 2, 0)
        return Image.fromarray(pixels.contiguous().numpy())
    if not isinstance(row, Tensor):
        raise Unknown(f"a transform of {work.pipeline.name} now returns a {type(row).__name__}")
    plain = row.as_subclass(Tensor)
    return plain.permute(1, 2, 0).clone(memory_format=torch.contiguous_format).permute(2, 0, 1) if work.pipeline.permuted else plain.clone()
