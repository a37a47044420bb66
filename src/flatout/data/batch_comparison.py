"""Compares two batches and reports how they differ."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAX_DEPTH = 8


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and bytes are equal: NaN equals itself, zero differs from minus zero."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    # A single element may have any stride, which a view as bytes does not allow without unsqueeze.
    first, second = (tensor.contiguous().flatten().unsqueeze(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(first, second)


def difference(plain: Any, other: Any, tolerance: float, layout: bool = True, depth: int = 0) -> str:
    """Why two batches differ, or "" if they are the same or no value differs by more than ``tolerance``.

    With ``layout``, strides must be equal too.
    """
    if type(plain) is not type(other):
        return f"it would return a {type(other).__name__} instead of a {type(plain).__name__}"
    if isinstance(plain, Tensor):
        return _tensor_difference(plain.as_subclass(Tensor), other.as_subclass(Tensor), tolerance, layout)
    if plain is other or depth > MAX_DEPTH:
        return "" if plain is other else "it is nested too deeply"
    if isinstance(plain, Mapping):
        if list(plain) != list(other):
            return "it has different keys"
        return next(
            (
                why
                for key in plain
                if (why := difference(plain[key], other[key], tolerance, layout, depth + 1))
            ),
            "",
        )
    if isinstance(plain, (list, tuple)):
        if len(plain) != len(other):
            return "it has a different length"
        return next(
            (
                why
                for a, b in zip(plain, other, strict=True)
                if (why := difference(a, b, tolerance, layout, depth + 1))
            ),
            "",
        )
    if hasattr(plain, "getbands"):
        same = (plain.mode, plain.size) == (other.mode, other.size) and plain.tobytes() == other.tobytes()
        return "" if same else "its images differ"
    if type(plain).__module__ == "numpy" and hasattr(plain, "tobytes"):
        same = (
            (plain.dtype, plain.shape) == (other.dtype, other.shape)
            and not plain.dtype.hasobject
            and plain.tobytes() == other.tobytes()
        )
        return "" if same else "its values differ"
    if is_equal(plain, other):
        return ""
    attributes = getattr(plain, "__dict__", None)
    compares_identity = type(plain).__eq__ is object.__eq__  # type: ignore[comparison-overlap]
    if attributes and compares_identity:  # an object of the program, made once per batch
        return difference(attributes, vars(other), tolerance, layout, depth + 1)
    return "its values differ"


def _tensor_difference(plain: Tensor, other: Tensor, tolerance: float, layout: bool) -> str:
    if (
        plain.dtype != other.dtype
        or plain.shape != other.shape
        or (layout and plain.stride() != other.stride())
    ):
        return (
            f"a tensor would be {other.dtype} {tuple(other.shape)} and not {plain.dtype} {tuple(plain.shape)}"
        )
    if same_bits(plain, other):
        return ""
    largest = float((plain.double() - other.double()).abs().max()) if tolerance else float("inf")
    return (
        "" if largest <= tolerance * 1.001 else "its values differ from those of the single-image transforms"
    )


def is_equal(plain: object, other: object) -> bool:
    try:
        return bool(plain == other)
    except Exception:  # parts that do not support comparison
        return False
