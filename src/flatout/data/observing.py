"""The recorder of plain transform calls, and how pipelines are read from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flatout.data.batch_comparison import difference
from flatout.data.deferring import BatchRecorder
from flatout.data.images import copy_image, same_pixels
from flatout.data.lowering import Lowered, count_deterministic, extend, lower
from flatout.data.operation import NotBatchable
from flatout.data.pipelines import (
    OriginalCall,
    Pipelines,
    TransformPipeline,
    package_of,
    parameters_of,
    recording,
    steps_of,
)
from flatout.data.streams import restore_states, same_states, states

MAX_CALLS = 8  # most calls recorded per transform
UNBATCHED_LIBRARIES = {
    "albumentations": "albumentations computes with OpenCV and draws from its own generators, so its images are computed one by one",
    "kornia": "kornia draws the numbers of a batch in a different order than those of single images, so its images are computed one by one",
}


class InPlaceTransform(NotBatchable):
    """Inspecting a sample changes it."""


@dataclass(eq=False)
class TransformCall:
    """A recorded transform call: its input image, its result, and the random generators before and after.

    ``parent`` is the call whose result was the input.
    """

    transform: Any
    parent: TransformCall | None
    image: Any
    result: Any
    before: Any
    after: Any
    in_place: bool

    @property
    def chain(self) -> list[TransformCall]:
        """The calls that the image went through, this one last."""
        return [*(self.parent.chain if self.parent is not None else ()), self]


class CallObserver:
    """Records the first calls of each transform. With ``on_copies``, transforms get copies of the images."""

    def __init__(self, rngs: Sequence[Any], on_copies: bool) -> None:
        self._rngs = rngs
        self._on_copies = on_copies
        self._counts: Counter[int] = Counter()
        self._results: dict[int, tuple[Any, TransformCall]] = {}
        self.calls: list[TransformCall] = []

    def call(self, transform: object, image: object, original: OriginalCall) -> Any:
        if self._counts[id(transform)] >= MAX_CALLS or not is_image(image):
            with recording(None):
                return original(transform, image)
        self._counts[id(transform)] += 1
        input_copy, argument = copy_image(image), copy_image(image) if self._on_copies else image
        before = states(self._rngs)
        with recording(None):
            result = original(transform, argument)
        parent = self._results.get(id(image), (None, None))[1]
        call = TransformCall(
            transform,
            parent,
            input_copy,
            copy_image(result),
            before,
            states(self._rngs),
            not same_pixels(input_copy, argument),
        )
        self.calls.append(call)
        self._results[id(result)] = result, call
        return result

    def before_seeding(self) -> None:
        """Do nothing: each call is recorded with its generator states."""


def is_image(thing: object) -> bool:
    return (
        isinstance(thing, Tensor)
        or hasattr(thing, "getbands")
        or (type(thing).__module__ == "numpy" and type(thing).__name__ == "ndarray")
    )


@dataclass
class PipelineReader:
    """How pipelines are read: for batches, or only for the steps before samples are kept."""

    batched: bool
    light: bool
    keeping: bool
    rngs: Sequence[Any] = ()

    def add(self, pipelines: Pipelines, calls: Sequence[TransformCall]) -> list[str]:
        """Read pipelines from these calls. Return why some are not batched. Moves random generators.

        Raises InPlace if a transform writes into its input image.
        """
        reasons: dict[str, None] = {}
        if any(call.in_place for call in calls):
            raise InPlaceTransform("its transforms change the images of the data set in place")
        producers = {id(call.parent.transform) for call in calls if call.parent is not None}
        groups: dict[int, list[TransformCall]] = {}
        for call in calls:
            groups.setdefault(id(call.transform), []).append(call)
        for group in groups.values():
            pipelines.mark_known(group[0].transform)
            self._add_pipeline(pipelines, None, group, id(group[0].transform) in producers, reasons)
        tried: set[tuple[int, int]] = set()
        for call in calls:  # earlier calls come first
            for parent in _pipelines_of(pipelines, call.parent):
                if (id(parent), id(call.transform)) not in tried:
                    tried.add((id(parent), id(call.transform)))
                    group = [
                        other
                        for other in calls
                        if other.transform is call.transform
                        and parent in _pipelines_of(pipelines, other.parent)
                    ]
                    self._add_pipeline(pipelines, parent, group, id(call.transform) in producers, reasons)
        return list(reasons)

    def _add_pipeline(
        self,
        pipelines: Pipelines,
        parent: TransformPipeline | None,
        group: list[TransformCall],
        has_successor: bool,
        reasons: dict[str, None],
    ) -> None:
        transform = group[0].transform
        lowered = None
        if self.batched:
            try:
                lowered = self._lowered(parent, group, has_successor)
            except NotBatchable as why:
                reasons[UNBATCHED_LIBRARIES.get(package_of(transform), str(why))] = None
        if lowered is None and (not self.keeping or (parent is not None and parent.lowered is not None)):
            return
        if (
            lowered is not None
            and lowered.exit.kind == "tensor"
            and {type(call.result) for call in group} == {Tensor}
        ):
            # v1 turns torchvision's images into plain tensors
            lowered = replace(lowered, exit=replace(lowered.exit, tv=False))
        pipeline = self._pipeline(len(pipelines.entries), parent, transform, lowered, group)
        if lowered is not None:
            why_not = _mismatch(pipeline, group, self.rngs)
            pipeline.reset_counts()
            if why_not:
                reasons[why_not] = None
                if not self.keeping or parent is not None:
                    return
                pipeline = self._pipeline(len(pipelines.entries), None, transform, None, group)
            else:
                reasons.update(dict.fromkeys(lowered.reasons))
        if pipeline.lowered is not None or pipeline.kept < len(pipeline.steps):
            pipelines.add(pipeline)
        else:
            pipelines.fully_kept.append(pipeline.parameters)

    def _lowered(
        self, parent: TransformPipeline | None, group: list[TransformCall], has_successor: bool
    ) -> Lowered:
        transform = group[0].transform
        if package_of(transform) in UNBATCHED_LIBRARIES:
            raise NotBatchable(UNBATCHED_LIBRARIES[package_of(transform)])
        if parent is None:
            return lower(
                transform, [copy_image(call.image) for call in group], self.light, unfinished=has_successor
            )
        if parent.lowered is None:
            raise NotBatchable(f"{parent.name} runs on single images")
        lowered = extend(parent.lowered, transform, self.light)
        if lowered.exit.kind == "pil" and not has_successor:
            raise NotBatchable("none of its transforms makes a tensor")
        return lowered

    def _pipeline(
        self,
        number: int,
        parent: TransformPipeline | None,
        transform: object,
        lowered: Lowered | None,
        group: list[TransformCall],
    ) -> TransformPipeline:
        call_steps = steps_of(transform)
        steps = (*(parent.steps if parent is not None else ()), *call_steps)
        start = lowered.start if lowered is not None else len(steps)
        kept = parent.kept if parent is not None else 0
        if parent is None and self.keeping:
            kept = count_deterministic(steps[:start], [copy_image(call.image) for call in group])
        batched_steps = steps[start : lowered.end] if lowered is not None else ()
        tensors = [
            call.result for call in group if isinstance(call.result, Tensor) and call.result.dim() == 3
        ]
        permuted = bool(tensors) and all(
            not image.is_contiguous() and image.permute(1, 2, 0).is_contiguous() for image in tensors
        )
        return TransformPipeline(
            number,
            parent,
            transform,
            steps,
            kept,
            start,
            lowered,
            parameters_of(transform, (*steps[:kept], *batched_steps)),
            permuted,
        )


def _pipelines_of(pipelines: Pipelines, call: TransformCall | None) -> list[TransformPipeline]:
    if call is None:
        return []
    found = [
        pipelines.of(parent, call.transform) for parent in (None, *_pipelines_of(pipelines, call.parent))
    ]
    return [pipeline for pipeline in found if pipeline is not None]


def _mismatch(pipeline: TransformPipeline, calls: Sequence[TransformCall], rngs: Sequence[Any]) -> str:
    links = pipeline.chain
    for call in calls:
        chain = call.chain[-len(links) :]
        if len(chain) < len(links) or any(
            member.transform is not link.transform for member, link in zip(chain, links, strict=True)
        ):
            continue
        recorder = BatchRecorder(Pipelines(), draw_now=True)
        image = copy_image(chain[0].image)
        with recording(None):
            for member, link in zip(chain, links, strict=True):
                restore_states(member.before)
                image = recorder.resume(link, image, 0)
                if not same_states(states(rngs), member.after):
                    return f"{link.name} draws its random numbers in an unknown order"
            recorder.close()
            why = difference(call.result, image, pipeline.tolerance, layout=False)
        if why:
            return f"the images of {pipeline.name} would differ in a batch: {why}"
    return ""
