"""JSON that came from elsewhere, brought into the shape that is expected: what does not fit is left out, as if it had not been seen.

A shape is a type (``str``), a tuple of types, ``[shape]`` for a list, ``{str: shape}`` for a table of any keys, or a table of known keys.
"""

from __future__ import annotations

import math
from typing import Any


class Misfit:
    """What does not fit; never part of a result."""


MISFIT = Misfit()


def fitted(value: Any, shape: Any) -> Any:
    """The value with everything left out that does not fit, or MISFIT where the value itself does not."""
    if isinstance(shape, list):
        return [each for item in value if (each := fitted(item, shape[0])) is not MISFIT] if isinstance(value, list) else MISFIT
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return MISFIT
        return {key: found for key, item in value.items()
                if isinstance(key, str) and (inner := shape.get(str, shape.get(key))) is not None and (found := fitted(item, inner)) is not MISFIT}
    kinds = shape if isinstance(shape, tuple) else (shape,)
    if isinstance(value, bool):
        return value if bool in kinds else MISFIT
    if isinstance(value, float) and not math.isfinite(value):
        return MISFIT
    return value if isinstance(value, kinds) or (isinstance(value, int) and float in kinds) else MISFIT
