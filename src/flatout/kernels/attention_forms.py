"""Recognise hand-written attention operator by operator.

    product of queries and keys -> [scale] -> [masks] -> softmax over the last axis -> [inactive dropout] ->
    product with the values

An ``AttentionForm`` records how scores or weights are computed. ``product`` starts one, ``extended`` adds an
operator, and ``finished`` adds the product with the values. Operators are identified by name, so the same code
reads calls of torch in a running program (``attention_deferred``) and nodes of a graph (``attention_graphs``).
An ``ArgumentReader`` interprets an argument in either. None means: this is not attention, or not known to be
equivalent.

In a row that keeps something, a score of -10,000 or less has weight zero, as minus infinity has. ``attend`` keeps
the result of a row that is masked completely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

PRODUCTS = frozenset(("matmul", "mm", "bmm", "baddbmm", "einsum", "__matmul__"))
MASKED = -1e4  # at most this score, softmax in float32 gives a weight of exactly zero next to any other
# Numbers that absorb a score of a few: their sum is the number itself, in each type.
DROWNING = {torch.float16: -3e4, torch.bfloat16: -8e3, torch.float32: -1e8, torch.float64: -1e17}


class ArgumentReader(Protocol):
    """Interprets an argument."""

    def tensor(self, thing: object) -> Any:
        """An object with the shape, dtype and device of this tensor; None if it is not a tensor."""

    def number(self, thing: object) -> float | None:
        """The value of a number, also in a tensor, if it is known."""

    def same(self, one: object, other: object) -> bool:
        """Whether two sizes are known to be equal."""


@dataclass(frozen=True)
class Mask:
    """One mask.

    ``kind``: "drop" (true: excluded), "keep" (true: kept), or "add". ``fill`` is the value of excluded
    scores. ``dtype`` is that of the masked scores. ``sizes`` are those of the mask, possibly viewed at other
    batch axes than those where it was applied.
    """

    kind: str
    tensor: Tensor
    fill: float
    dtype: torch.dtype
    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class AttentionForm:
    """Scores or weights [*batch, rows, columns].

    With their axes in the order of ``q_axes`` and ``k_axes`` (None: unchanged), queries are [*batch, rows,
    width] and keys [*batch, columns, width], up to sizes of 1 in the batch. ``dtype`` is that of their
    product. ``masked`` are the batch sizes at which the masks were applied, ``first`` those of the product.
    """

    q: Tensor
    k: Tensor
    q_axes: tuple[int, ...] | None
    k_axes: tuple[int, ...] | None
    first: tuple[Any, ...]
    batch: tuple[Any, ...]
    rows: Any
    columns: Any
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    masked: tuple[Any, ...] = ()
    is_weights: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        return (*self.batch, self.rows, self.columns)


@dataclass(frozen=True)
class AttentionMatch:
    """The product with the values, [*batch, columns, width] with axes in the order of ``v_axes``.

    ``axes`` gives the order of the result's axes.
    """

    form: AttentionForm
    v: Tensor
    v_axes: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Call:
    """One call of an operator, with scores or weights as argument number ``at``.

    ``made`` has the shape and dtype of the result.
    """

    see: ArgumentReader
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    at: int
    made: Any


# -- the product of queries and keys -------------------------------------------------------------------------


def with_operands(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Unpack the operand list that torch.einsum also accepts."""
    listed = name == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple))
    return (args[0], *args[1]) if listed else args


def product(
    see: ArgumentReader, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> AttentionForm | None:
    """The form that this product may start. The caller, who knows the result, sets ``dtype``."""
    if name == "einsum":
        return _einsum_product(see, args) if not kwargs else None
    if name == "baddbmm":
        named = (
            dict(zip(("input", "batch1", "batch2"), args, strict=False)) | {"beta": 1, "alpha": 1} | kwargs
        )
        return _baddbmm(see, **named) if len(named) == 5 else None
    if len(args) != 2 or kwargs:
        return None
    q, k = map(see.tensor, args)
    if q is None or k is None or min(len(q.shape), len(k.shape)) < 2:
        return None
    batch, last = broadcast(see, q.shape[:-2], k.shape[:-2]), len(k.shape) - 1
    if batch is None or not see.same(q.shape[-1], k.shape[-2]):
        return None
    swapped = (*range(last - 1), last, last - 1)
    return AttentionForm(args[0], args[1], None, swapped, batch, batch, q.shape[-2], k.shape[-1])


def _baddbmm(
    see: ArgumentReader, input: Tensor, batch1: Tensor, batch2: Tensor, beta: object, alpha: object
) -> AttentionForm | None:
    form, share, scale = product(see, "bmm", (batch1, batch2), {}), see.number(beta), see.number(alpha)
    if form is None or share not in (0, 1) or scale is None or not 0 < scale < math.inf:
        return None
    form = replace(form, scale=float(scale))
    return form if share == 0 else with_mask(see, form, "add", input, see.tensor(input).dtype)


def _einsum_product(see: ArgumentReader, args: Sequence[Any]) -> AttentionForm | None:
    spelled = einsum_letters(see, args)
    if spelled is None:
        return None
    operands, letters, out = spelled
    one, other = map(set, letters)
    summed = (one & other) - set(out)
    if len(out) < 2 or len(summed) != 1 or one | other != set(out) | summed:
        return None
    rows, columns = out[-2], out[-1]
    q, k = (0, 1) if rows in one else (1, 0)
    if rows in letters[k] or columns in letters[q] or not set(out[:-2]) <= one & other:
        return None
    axes, sizes = [], []
    for at, free in ((q, rows), (k, columns)):
        axes.append(tuple(letters[at].index(letter) for letter in (*out[:-2], free, *summed)))
        sizes.append([see.tensor(operands[at]).shape[axis] for axis in axes[-1]])
    batch = broadcast(see, sizes[0][:-2], sizes[1][:-2])
    if batch is None:
        return None
    return AttentionForm(operands[q], operands[k], axes[0], axes[1], batch, batch, sizes[0][-2], sizes[1][-2])


def einsum_letters(see: ArgumentReader, args: Sequence[Any]) -> tuple[list[Any], tuple[str, str], str] | None:
    """Operands, their letters, and the letters of the result; an ellipsis gets its own letters."""
    if len(args) != 3 or not isinstance(args[0], str) or args[0].count("->") != 1:
        return None
    inputs, out = args[0].replace(" ", "").split("->")
    operands, tensors, words = (
        list(args[1:]),
        [see.tensor(operand) for operand in args[1:]],
        inputs.split(","),
    )
    if len(words) != 2 or any(tensor is None for tensor in tensors):
        return None
    axes = [len(tensor.shape) for tensor in tensors]
    free = max(count - len(word.replace("...", "")) for word, count in zip(words, axes, strict=True))
    digits = "0123456789"[: max(free, 0)] if "..." in inputs else ""
    one, other = (word.replace("...", digits) for word in words)
    if [len(set(one)), len(set(other))] != axes or [len(one), len(other)] != axes:
        return None  # a diagonal, or ellipses of different lengths
    return operands, (one, other), out.replace("...", digits)


def broadcast(see: ArgumentReader, one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...] | None:
    """Broadcast sizes as torch does; None if they do not fit."""
    length = max(len(one), len(other))
    sizes = []
    for a, b in zip((*[1] * (length - len(one)), *one), (*[1] * (length - len(other)), *other), strict=True):
        if not see.same(a, b) and not see.same(a, 1) and not see.same(b, 1):
            return None
        sizes.append(b if see.same(a, 1) else a)
    return tuple(sizes)


def alike(see: ArgumentReader, one: Sequence[Any] | None, other: Sequence[Any]) -> bool:
    return one is not None and len(one) == len(other) and all(map(see.same, one, other))


# -- masks ---------------------------------------------------------------------------------------------------


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
    if kind == "add":
        fits = mask.dtype is form.dtype or (mask.dtype, form.dtype) == (torch.float32, torch.bfloat16)
    else:
        fills = {other.fill for other in form.masks if other.kind != "add"}
        fits = mask.dtype is torch.bool and fills <= {fill}
    if not fits:
        return None
    masks = [*form.masks, Mask(kind, tensor, fill, dtype, tuple(mask.shape))]
    if not alike(see, form.masked, form.batch):
        for number, earlier in enumerate(form.masks):
            moved = _at(earlier, form.masked, form.batch)
            if moved is None:
                return None
            masks[number] = moved
    # Together with an added mask, excluded scores must not depend on their former values.
    if len({mask.kind == "add" for mask in masks}) == 2 and any(
        mask.fill > DROWNING[mask.dtype] for mask in masks
    ):
        return None
    return replace(form, masks=tuple(masks), masked=form.batch)


def _at(mask: Mask, old: Sequence[Any], new: Sequence[Any]) -> Mask | None:
    """The mask at other batch axes, derived from the old ones by a view; None if it would need to grow."""
    if not all(isinstance(size, int) and size > 0 for size in (*old, *new, *mask.sizes)):
        return None
    sizes = (*[1] * (len(old) + 2 - len(mask.sizes)), *mask.sizes)
    moved: list[int] = []
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
            moved += [1] * len(new[there:j])
        elif tuple(sizes[start:i]) == tuple(old[start:i]):
            moved += new[there:j]
        else:
            return None
    return replace(mask, sizes=(*moved, *sizes[-2:]))


# -- operators in between ------------------------------------------------------------------------------------


def extended(form: AttentionForm, call: Call) -> AttentionForm | None:
    """The form of this call's result."""
    change = CHANGES.get(call.name)
    if change is None or not call.made.dtype.is_floating_point:
        return None
    longer = change(form, call)
    return longer if longer is not None and alike(call.see, call.made.shape, longer.shape) else None


def _scaled(form: AttentionForm, call: Call) -> AttentionForm | None:
    inverse = "div" in call.name
    if len(call.args) != 2 or call.kwargs or (inverse and call.at):
        return None
    factor = call.see.number(call.args[1 - call.at])
    if (
        factor is None
        or not 0 < factor < math.inf
        or form.is_weights
        or any(mask.kind == "add" or mask.fill > -math.inf for mask in form.masks)
    ):
        return None
    return replace(form, scale=form.scale / factor if inverse else form.scale * factor)


def _added(form: AttentionForm, call: Call) -> AttentionForm | None:
    if len(call.args) != 2 or call.kwargs:
        return None
    return with_mask(call.see, form, "add", call.args[1 - call.at], call.made.dtype)


def _filled(form: AttentionForm, call: Call) -> AttentionForm | None:
    named = dict(zip(("self", "mask", "value"), call.args, strict=False)) | call.kwargs
    if call.at != 0 or len(named) != 3:
        return None
    fill = call.see.number(named.get("value"))
    return with_mask(call.see, form, "drop", named.get("mask"), call.made.dtype, fill)


def _chosen(form: AttentionForm, call: Call) -> AttentionForm | None:
    if len(call.args) != 3 or call.kwargs:
        return None
    one, two, three = call.args
    mask, fill, kind = {0: (two, three, "keep"), 1: (one, three, "keep"), 2: (one, two, "drop")}[call.at]
    return with_mask(call.see, form, kind, mask, call.made.dtype, call.see.number(fill))


def _weighed(form: AttentionForm, call: Call) -> AttentionForm | None:
    axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    last = isinstance(axis, int) and axis in (-1, len(form.shape) - 1)
    known = call.kwargs.keys() <= {"dim", "dtype", "_stacklevel"}
    return replace(form, is_weights=True) if last and known and not form.is_weights else None


def drops(call: Call) -> bool:
    """Whether this is a dropout that draws random numbers."""
    if call.name != "dropout":
        return False
    named = dict(zip(("input", "p", "training"), call.args, strict=False))
    named = {"p": 0.5, "training": True, "train": True} | named | call.kwargs
    return bool(named["training"] and named["train"]) and call.see.number(named["p"]) != 0


def _unchanged(form: AttentionForm, call: Call) -> AttentionForm | None:
    return form if call.at == 0 and not drops(call) else None


def _seen_as(form: AttentionForm, call: Call) -> AttentionForm | None:
    """Other batch axes in front of the same last two axes."""
    shape = call.made.shape
    kept = call.at == 0 and alike(call.see, shape[-2:], (form.rows, form.columns))
    return replace(form, batch=tuple(shape[:-2])) if kept else None


CHANGES: dict[str, Callable[[AttentionForm, Call], AttentionForm | None]] = {
    **dict.fromkeys(("mul", "multiply", "mul_", "imul"), _scaled),
    **dict.fromkeys(("div", "true_divide", "div_", "truediv", "itruediv"), _scaled),
    **dict.fromkeys(("add", "add_", "iadd"), _added),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _filled),
    "where": _chosen,
    "softmax": _weighed,
    **dict.fromkeys(("float", "half", "bfloat16", "double", "to", "type", "type_as"), _unchanged),
    **dict.fromkeys(("contiguous", "dropout"), _unchanged),
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


def finished(form: AttentionForm, call: Call) -> AttentionMatch | None:
    """The whole attention, if this call multiplies weights by values."""
    see, args = call.see, call.args
    if not form.is_weights or call.kwargs or call.made.dtype is not form.dtype:
        return None
    if call.name == "einsum":
        match = _einsum_values(form, call)
    else:
        v = see.tensor(args[1]) if call.at == 0 and len(args) == 2 and call.name != "baddbmm" else None
        match = AttentionMatch(form, args[1]) if v is not None and len(v.shape) >= 2 else None
    if match is None:
        return None
    shape = see.tensor(match.v).shape
    sizes = [shape[axis] for axis in match.v_axes or range(len(shape))]
    fits = (
        alike(see, broadcast(see, sizes[:-2], form.batch), form.batch)
        and see.same(sizes[-2], form.columns)
        and 0 < form.scale < math.inf
    )
    return match if fits else None


def _einsum_values(form: AttentionForm, call: Call) -> AttentionMatch | None:
    spelled = einsum_letters(call.see, call.args)
    if spelled is None:
        return None
    operands, letters, out = spelled
    weights, values = letters[call.at - 1], letters[2 - call.at]
    batch, rows, columns = weights[:-2], weights[-2], weights[-1]
    width = set(values) - {*batch, columns}
    result = (*batch, rows, *width)
    if (
        len(width) != 1
        or rows in values
        or not {*batch, columns} < set(values)
        or set(out) != set(result)
        or len(out) != len(weights)
    ):
        return None
    v_axes = tuple(values.index(letter) for letter in (*batch, columns, *width))
    return AttentionMatch(form, operands[2 - call.at], v_axes, tuple(map(result.index, out)))
