"""Finds the suspended generators through which the batches of a loader reach the script.

A library may wrap a loader in a generator that is one batch ahead of the script. Only the loop that runs holds
the generator, so no variable leads to the batch that waits in it.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable
from types import FrameType, GeneratorType
from typing import Any

from flatout.agent.frames import HOME
from flatout.agent.names import variables_of
from flatout.checkpoint.resume.reachable_state import HOLDING

DEEPEST = 6  # generators and iterators such as `enumerate`, one around the other


def is_of_generator(frame: FrameType | None) -> bool:
    """Whether the function that takes a batch, past flatout's own, is a generator."""
    while frame is not None and frame.f_code.co_filename.startswith(HOME):
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def held_batches(iterators: Iterable[tuple[int, Any]]) -> dict[str, dict[str, Any]]:
    """Return the variables of each generator around these numbered iterators, by a name stable between runs."""
    names = {id(iterator): f"batches {number}" for number, iterator in iterators}
    around: list[Any] = [iterator for _, iterator in iterators]
    found: dict[str, dict[str, Any]] = {}
    for _ in range(DEEPEST):
        holders = [
            each
            for each in (gc.get_referrers(*around) if around else ())
            if isinstance(each, (GeneratorType, *HOLDING)) and id(each) not in names
        ]
        for holder in holders:
            inside = min(names[id(each)] for each in gc.get_referents(holder) if id(each) in names)
            names[id(holder)] = f"{inside}, {getattr(holder, '__qualname__', type(holder).__name__)}"
            if isinstance(holder, GeneratorType) and holder.gi_frame is not None:
                found[_unused(names[id(holder)], found)] = variables_of(holder.gi_frame, always=True)
        around = holders
    return found


def _unused(name: str, known: dict[str, Any]) -> str:
    return name if name not in known else _unused(f"{name}'", known)
