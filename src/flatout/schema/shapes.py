"""Fit untrusted JSON to an expected shape. Parts that do not fit are dropped, as if they were missing.

A shape is a type (``str``), a tuple of types, ``[shape]`` for a list, ``{str: shape}`` for a table with any
keys, or a table of known keys.
"""

from __future__ import annotations

import math
from typing import Any


class ShapeMismatch:
    """Marker of a value that does not fit. It is never part of a result."""


MISFIT = ShapeMismatch()


def fitted(value: object, shape: object) -> Any:
    """Return the value without the parts that do not fit, or MISFIT if the value itself does not fit."""
    if isinstance(shape, list):
        return (
            [each for item in value if (each := fitted(item, shape[0])) is not MISFIT]
            if isinstance(value, list)
            else MISFIT
        )
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return MISFIT
        return {
            key: found
            for key, item in value.items()
            if isinstance(key, str)
            and (inner := shape.get(str, shape.get(key))) is not None
            and (found := fitted(item, inner)) is not MISFIT
        }
    kinds = shape if isinstance(shape, tuple) else (shape,)
    if isinstance(value, bool):
        return value if bool in kinds else MISFIT
    if isinstance(value, float) and not math.isfinite(value):
        return MISFIT
    return value if isinstance(value, kinds) or (isinstance(value, int) and float in kinds) else MISFIT
