"""Finds the generators through which the batches of a loader reach the script.

A library may wrap a loader in a generator that is one batch ahead of the script. Only the loop that runs holds
the generator, so no variable leads to the batch that waits in it.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterable
from types import FrameType, GeneratorType
from typing import Any

from flatout.agent.frames import FLATOUT_DIR
from flatout.agent.names import variables_of

GC_GENERATIONS = (
    0,
    1,
    2,
)  # of Python's garbage collector; a generator is usually young when it takes the first batch


class BatchHolders:
    """The generators on the stack when a batch is taken, innermost first."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def update(self, frame: FrameType | None) -> None:
        """Look for the generators when another one takes batches. ``frame``: the caller of the iterator."""
        while frame is not None and frame.f_code.co_filename.startswith(FLATOUT_DIR):
            frame = frame.f_back
        if frame is None or not frame.f_code.co_flags & inspect.CO_GENERATOR:
            self._refs.clear()
            return
        innermost = self._refs[0]() if self._refs else None
        if innermost is None or innermost.gi_frame is not frame:
            self._refs = list(map(weakref.ref, _running(frame)))

    def variables(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yield the variables of each suspended generator, by a name that is the same in each run."""
        for i, ref in enumerate(self._refs):
            generator = ref()
            if generator is not None and generator.gi_suspended:
                yield f"{generator.__qualname__} {i}", variables_of(generator.gi_frame, always=True)


def _running(frame: FrameType | None) -> list[Any]:
    frames = []
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            frames.append(frame)
        frame = frame.f_back
    codes = {frame.f_code for frame in frames}
    generators: dict[int, Any] = {}
    for generation in GC_GENERATIONS:
        for item in gc.get_objects(generation):
            if type(item) is GeneratorType and item.gi_running and item.gi_code in codes:
                generators[id(item.gi_frame)] = item
        if all(id(frame) in generators for frame in frames):
            break
    return [generators[id(frame)] for frame in frames if id(frame) in generators]
