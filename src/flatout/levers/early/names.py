"""Find where a script keeps its values: variables, and the containers and ``self`` that variables name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MAX_ITEMS = 32  # longer lists hold data
FLATOUT_FOLDER = str(Path(__file__).resolve().parents[2]) + os.sep
ScriptName = tuple[
    CodeType, str, Any
]  # function, variable, key or index inside it; None for the variable itself
Variables = Callable[[FrameType], Mapping[str, Any]]


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames of the script and its libraries from ``frame`` outwards, without those of torch and flatout."""
    while frame is not None:
        if not _is_torchs_or_ours(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _is_torchs_or_ours(filename: str) -> bool:
    return filename.startswith((FLATOUT_FOLDER, "<frozen")) or any(
        f"{os.sep}{folder}{os.sep}torch{os.sep}" in filename for folder in ("site-packages", "dist-packages")
    )


def tensors(
    frame: FrameType, variables_of: Variables, is_value: Callable[[Any], bool]
) -> Iterator[tuple[ScriptName, Any]]:
    """All values in the function's variables for which ``is_value`` is true."""
    for variable, value in list(_variables(frame, variables_of).items()):
        if is_value(value):
            yield (frame.f_code, variable, None), value
            continue
        for key, item in _items_of(variable, value):
            if is_value(item):
                yield (frame.f_code, variable, key), item


def values_of(
    frame: FrameType, names: Mapping[CodeType, Mapping[ScriptName, Any]], variables_of: Variables
) -> Iterator[tuple[ScriptName, Any]]:
    """The present values of these names in the function."""
    wanted_names = names.get(frame.f_code)
    if not wanted_names:
        return
    variables = _variables(frame, variables_of)
    for name in wanted_names:
        _, variable, key = name
        value = variables.get(variable)
        yield name, value if key is None else dict(_items_of(variable, value)).get(key)


def _variables(frame: FrameType, variables_of: Variables) -> Mapping[str, Any]:
    return variables_of(frame) if frame.f_code.co_flags & inspect.CO_OPTIMIZED else frame.f_locals


def _items_of(variable: str, value: Any) -> list[tuple[Any, Any]]:
    if variable == "self":
        return list(getattr(value, "__dict__", {}).items())
    if isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return list(dict.items(value))
    return list(enumerate(value)) if type(value) in (list, tuple) and len(value) <= MAX_ITEMS else []
