"""Recognise hand-written attention operator by operator, and compute it in fused form.

    product of queries and keys -> [scale] -> [masks] -> softmax over the last axis -> [inactive dropout] ->
    product with the values

A ``AttentionForm`` records how scores or weights are computed. ``product`` starts one, ``extended`` adds an operator,
``finished`` adds the product with the values, and ``attend`` computes the whole. Operators are identified by
name, so the same code reads calls of torch in a running program (``attention_deferred``) and nodes of a graph
(``attention_graphs``). ``ArgumentReader`` interprets an argument in either. None means: this is not attention, or not
known to be equivalent.

Fully masked rows keep their result. If the masked scores are minus infinity, softmax gives NaN, and so does
this. If they are a large negative number that absorbs the scores, all columns weigh the same: such a row gets
a query of zeros. The kernel sees neither case: the added mask is shifted row by row, which softmax ignores,
and rows that keep nothing keep everything. In all other rows, a score of -10,000 or less has weight zero, as
minus infinity has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flatout.kernels.attention_products import alike, with_mask
from flatout.kernels.attention_reading import ArgumentReader, AttentionForm

MAKES_MASKS = frozenset(
    (
        "__getitem__",
        "getitem",
        "eq",
        "__eq__",
        "ne",
        "__ne__",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_not",
        "logical_or",
        "logical_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_and",
        "__invert__",
        "invert",
        "inv",
        "__or__",
        "or_",
        "__and__",
        "and_",
        "__rsub__",
        "sub",
        "mul",
        "neg",
        "bool",
        "to",
        "type",
        "float",
        "tril",
        "triu",
        "ones",
        "zeros",
        "full",
        "arange",
        "view",
        "unsqueeze",
        "squeeze",
        "expand",
        "masked_fill",
        "tensor",
    )
)


# -- the product of queries and keys -------------------------------------------------------------------------


# -- operators in between ------------------------------------------------------------------------------------


def extended(
    see: ArgumentReader,
    name: str,
    form: AttentionForm,
    at: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    made: Any,
) -> AttentionForm | None:
    """The form of this operator's result.

    ``args[at]`` has the form; ``made`` has the shape and dtype of the result.
    """
    change = CHANGES.get(name)
    if change is None or not made.dtype.is_floating_point:
        return None
    found: AttentionForm | None = change(see, form, at, args, kwargs, made)
    return found if found is not None and alike(see, made.shape, found.shape) else None


def _scaled(inverse: bool) -> Callable[..., AttentionForm | None]:
    def scaled(
        see: ArgumentReader,
        form: AttentionForm,
        at: int,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        made: object,
    ) -> AttentionForm | None:
        factor = see.number(args[1 - at]) if len(args) == 2 and not kwargs and not (inverse and at) else None
        if (
            factor is None
            or not 0 < factor < math.inf
            or form.is_weights
            or any(mask.kind == "add" or mask.fill > -math.inf for mask in form.masks)
        ):
            return None
        return replace(form, scale=form.scale / factor if inverse else form.scale * factor)

    return scaled


def _added(
    see: ArgumentReader, form: AttentionForm, at: int, args: Sequence[Any], kwargs: dict[str, Any], made: Any
) -> AttentionForm | None:
    return with_mask(see, form, "add", args[1 - at], made.dtype) if len(args) == 2 and not kwargs else None


def _filled(
    see: ArgumentReader, form: AttentionForm, at: int, args: Sequence[Any], kwargs: dict[str, Any], made: Any
) -> AttentionForm | None:
    given = dict(zip(("self", "mask", "value"), args, strict=False)) | kwargs
    return (
        with_mask(see, form, "drop", given.get("mask"), made.dtype, see.number(given.get("value")))
        if at == 0 and len(given) == 3
        else None
    )


def _chosen(
    see: ArgumentReader, form: AttentionForm, at: int, args: Sequence[Any], kwargs: dict[str, Any], made: Any
) -> AttentionForm | None:
    if len(args) != 3 or kwargs:
        return None
    condition, fill, kind = {
        0: (args[1], args[2], "keep"),
        1: (args[0], args[2], "keep"),
        2: (args[0], args[1], "drop"),
    }[at]
    return with_mask(see, form, kind, condition, made.dtype, see.number(fill))


def _weighed(
    see: ArgumentReader,
    form: AttentionForm,
    at: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    made: object,
) -> AttentionForm | None:
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    last = isinstance(axis, int) and axis in (-1, len(form.shape) - 1)
    return (
        replace(form, is_weights=True)
        if last and not form.is_weights and kwargs.keys() <= {"dim", "dtype", "_stacklevel"}
        else None
    )


def drops(see: ArgumentReader, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this is a dropout that draws random numbers."""
    if name != "dropout":
        return False
    given = (
        {"p": 0.5, "training": True, "train": True}
        | dict(zip(("input", "p", "training"), args, strict=False))
        | kwargs
    )
    return bool(given["training"] and given["train"]) and see.number(given["p"]) != 0


def _left_whole(
    see: ArgumentReader,
    form: AttentionForm,
    at: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    made: object,
) -> AttentionForm | None:
    return None if drops(see, "dropout", args, kwargs) else form


def _unchanged(
    see: ArgumentReader,
    form: AttentionForm,
    at: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    made: object,
) -> AttentionForm | None:
    return form if at == 0 else None


def _seen_as(
    see: ArgumentReader, form: AttentionForm, at: int, args: Sequence[Any], kwargs: dict[str, Any], made: Any
) -> AttentionForm | None:
    """Other batch axes in front of the same last two axes."""
    kept = (
        at == 0
        and len(made.shape) >= 2
        and see.same(made.shape[-2], form.rows)
        and see.same(made.shape[-1], form.columns)
    )
    return replace(form, batch=tuple(made.shape[:-2])) if kept else None


CHANGES: dict[str, Callable[..., AttentionForm | None]] = {
    **dict.fromkeys(("mul", "multiply", "mul_", "imul"), _scaled(False)),
    **dict.fromkeys(("div", "true_divide", "div_", "truediv", "itruediv"), _scaled(True)),
    **dict.fromkeys(("add", "add_", "iadd"), _added),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _filled),
    "where": _chosen,
    "softmax": _weighed,
    "dropout": _left_whole,
    **dict.fromkeys(
        ("float", "half", "bfloat16", "double", "to", "type", "type_as", "contiguous"), _unchanged
    ),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"), _seen_as),
}
OUT_OF_PLACE = {
    "mul_": "mul",
    "imul": "mul",
    "div_": "div",
    "itruediv": "div",
    "add_": "add",
    "iadd": "add",
    "masked_fill_": "masked_fill",
}


# -- the product with the values -----------------------------------------------------------------------------
