"""Recognises products of queries and keys: matmul, baddbmm, einsum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flatout.kernels.attention_reading import ArgumentReader, AttentionForm, Mask

if TYPE_CHECKING:
    from torch import Tensor

PRODUCTS = frozenset(("matmul", "mm", "bmm", "baddbmm", "einsum", "__matmul__"))
MASKED = -1e4  # at most this score, softmax in float32 gives a weight of exactly zero next to any other
# Numbers that absorb a score of a few: their sum is the number itself, in each type.
DROWNING = {torch.float16: -3e4, torch.bfloat16: -8e3, torch.float32: -1e8, torch.float64: -1e17}
BADDBMM = ("input", "batch1", "batch2", "beta", "alpha")


def with_operands(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Unpack the operand list that torch.einsum also accepts."""
    return (
        (args[0], *args[1])
        if name == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple))
        else args
    )


def product(
    see: ArgumentReader, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> AttentionForm | None:
    """The form that this product may start. The caller, who knows the result, sets ``dtype``."""
    if name == "einsum":
        return _einsum_product(see, args) if not kwargs else None
    if name == "baddbmm":
        given = (
            dict(zip(("input", "batch1", "batch2"), args, strict=False)) | {"beta": 1, "alpha": 1} | kwargs
        )
        return _baddbmm(see, *(given[key] for key in BADDBMM)) if set(given) == set(BADDBMM) else None
    if len(args) != 2 or kwargs:
        return None
    q, k = map(see.tensor, args)
    if (
        q is None
        or k is None
        or len(q.shape) < 2
        or len(k.shape) < 2
        or not see.same(q.shape[-1], k.shape[-2])
    ):
        return None
    batch = broadcast(see, q.shape[:-2], k.shape[:-2])
    last = len(k.shape) - 1
    return (
        None
        if batch is None
        else AttentionForm(
            args[0], args[1], None, (*range(last - 1), last, last - 1), batch, batch, q.shape[-2], k.shape[-1]
        )
    )


def _baddbmm(
    see: ArgumentReader, added: object, q: Tensor, k: Tensor, beta: object, alpha: object
) -> AttentionForm | None:
    form, share, scale = product(see, "bmm", (q, k), {}), see.number(beta), see.number(alpha)
    if form is None or share not in (0, 1) or scale is None or not 0 < scale < math.inf:
        return None
    form = replace(form, scale=float(scale))
    return form if share == 0 else with_mask(see, form, "add", added, see.tensor(added).dtype)


def _einsum_product(see: ArgumentReader, args: Sequence[Any]) -> AttentionForm | None:
    found = einsum_letters(see, args)
    if found is None:
        return None
    operands, (one, other), out = found
    summed = (set(one) & set(other)) - set(out)
    if len(out) < 2 or len(summed) != 1 or set(one) | set(other) != set(out) | summed:
        return None
    rows, columns = out[-2], out[-1]
    q, k = (0, 1) if rows in one else (1, 0)
    letters = (one, other)
    if rows in letters[k] or columns in letters[q] or not set(out[:-2]) <= set(one) & set(other):
        return None
    shapes = [see.tensor(operands[at]).shape for at in (q, k)]
    axes = [
        tuple(letters[at].index(each) for each in (*out[:-2], free, *summed))
        for at, free in ((q, rows), (k, columns))
    ]
    sizes = [[shape[at] for at in order] for shape, order in zip(shapes, axes, strict=True)]
    batch = broadcast(see, sizes[0][:-2], sizes[1][:-2])
    return (
        None
        if batch is None
        else AttentionForm(
            operands[q], operands[k], axes[0], axes[1], batch, batch, sizes[0][-2], sizes[1][-2]
        )
    )


def einsum_letters(see: ArgumentReader, args: Sequence[Any]) -> tuple[list[Any], tuple[str, str], str] | None:
    """Operands, their letters, and the letters of the result; an ellipsis gets its own letters."""
    if len(args) != 3 or not isinstance(args[0], str) or args[0].count("->") != 1:
        return None
    inputs, out = args[0].replace(" ", "").split("->")
    operands, tensors = list(args[1:]), [see.tensor(each) for each in args[1:]]
    words = inputs.split(",")
    if len(words) != 2 or any(tensor is None for tensor in tensors):
        return None
    free = [
        len(tensor.shape) - len(word.replace("...", "")) for word, tensor in zip(words, tensors, strict=True)
    ]
    digits = "0123456789"[: max(free)] if "..." in inputs else ""
    spelled = [word.replace("...", digits) for word in words]
    if any(
        len(word) != len(tensor.shape) or len(set(word)) != len(word)
        for word, tensor in zip(spelled, tensors, strict=True)
    ):
        return None  # a diagonal, or ellipses of different lengths
    return operands, (spelled[0], spelled[1]), out.replace("...", digits)


def broadcast(see: ArgumentReader, one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...] | None:
    """Broadcast sizes as torch does; None if they do not fit."""
    length = max(len(one), len(other))
    pairs = zip((*[1] * (length - len(one)), *one), (*[1] * (length - len(other)), *other), strict=True)
    found = []
    for a, b in pairs:
        if not see.same(a, b) and not see.same(a, 1) and not see.same(b, 1):
            return None
        found.append(b if see.same(a, 1) else a)
    return tuple(found)


def alike(see: ArgumentReader, one: Sequence[Any] | None, other: Sequence[Any]) -> bool:
    return one is not None and len(one) == len(other) and all(map(see.same, one, other))


def with_mask(
    see: ArgumentReader,
    form: AttentionForm,
    kind: str,
    tensor: Tensor,
    dtype: torch.dtype,
    fill: float | None = -math.inf,
) -> AttentionForm | None:
    mask = see.tensor(tensor)
    if mask is None or form.is_weights or fill is None or fill > MASKED:
        return None
    if not alike(see, broadcast(see, mask.shape, form.shape), form.shape):
        return None
    if (
        kind == "add"
        and mask.dtype is not form.dtype
        and (mask.dtype, form.dtype) != (torch.float32, torch.bfloat16)
    ):
        return None
    if kind != "add" and (
        mask.dtype is not torch.bool or any(each.kind != "add" and each.fill != fill for each in form.masks)
    ):
        return None
    moved = (
        form.masks
        if alike(see, form.masked, form.batch)
        else tuple(_at(mask, form.masked, form.batch) for mask in form.masks)
    )
    masks = tuple(
        mask for mask in (*moved, Mask(kind, tensor, fill, dtype, tuple(mask.shape))) if mask is not None
    )
    if len(masks) != len(form.masks) + 1:
        return None
    # Together with an added mask, excluded scores must not depend on their former values.
    if len({each.kind == "add" for each in masks}) == 2 and any(
        -math.inf < each.fill and each.fill > DROWNING[each.dtype] for each in masks
    ):
        return None
    return replace(form, masks=masks, masked=form.batch)


def _at(mask: Mask, old: Sequence[Any], new: Sequence[Any]) -> Mask | None:
    """The mask at other batch axes, derived from the old ones by a view; None if it would need to grow."""
    if not all(isinstance(size, int) and size > 0 for size in (*old, *new, *mask.sizes)):
        return None
    sizes = (*[1] * (len(old) + 2 - len(mask.sizes)), *mask.sizes)
    found: list[int] = []
    i = j = 0
    while i < len(old) or j < len(new):
        start, i, ours, theirs, there = i, i + 1, math.prod(old[i : i + 1]), math.prod(new[j : j + 1]), j
        j += 1
        while ours != theirs:
            if ours < theirs:
                ours, i = ours * old[i], i + 1
            else:
                theirs, j = theirs * new[j], j + 1
        if all(size == 1 for size in sizes[start:i]):
            found += [1] * len(new[there:j])
        elif tuple(sizes[start:i]) == tuple(old[start:i]):
            found += new[there:j]
        else:
            return None
    return replace(mask, sizes=(*found, *sizes[-2:]))
