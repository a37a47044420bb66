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
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

PRODUCTS = frozenset(("matmul", "mm", "bmm", "baddbmm", "einsum", "__matmul__"))
MASKED = -1e4  # at most this score, softmax in float32 gives a weight of exactly zero next to any other
# Numbers that absorb a score of a few: their sum is the number itself, in each type.
DROWNING = {torch.float16: -3e4, torch.bfloat16: -8e3, torch.float32: -1e8, torch.float64: -1e17}


BADDBMM = ("input", "batch1", "batch2", "beta", "alpha")
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


class ArgumentReader(Protocol):
    """Interprets an argument."""

    def tensor(self, thing: Any) -> Any:
        """An object with the shape, dtype and device of this tensor; None if it is not a tensor."""

    def number(self, thing: Any) -> float | None:
        """The value of a number, also in a tensor, if it is known."""

    def same(self, one: Any, other: Any) -> bool:
        """Whether two sizes are known to be equal."""


@dataclass(frozen=True)
class Mask:
    """One mask.

    ``kind``: "drop" (true: excluded), "keep" (true: kept), or "add". ``fill`` is the value of excluded
    scores. ``dtype`` is that of the masked scores. ``sizes`` are those of the mask, possibly viewed at other
    batch axes than those where it was applied.
    """

    kind: str
    tensor: Any
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

    q: Any
    k: Any
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
    v: Any
    v_axes: tuple[int, ...] | None
    axes: tuple[int, ...] | None


def with_operands(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Unpack the operand list that torch.einsum also accepts."""
    return (
        (args[0], *args[1])
        if name == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple))
        else args
    )


# -- the product of queries and keys -------------------------------------------------------------------------


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
    batch = _broadcast(see, q.shape[:-2], k.shape[:-2])
    last = len(k.shape) - 1
    return (
        None
        if batch is None
        else AttentionForm(
            args[0], args[1], None, (*range(last - 1), last, last - 1), batch, batch, q.shape[-2], k.shape[-1]
        )
    )


def _baddbmm(see: ArgumentReader, added: Any, q: Any, k: Any, beta: Any, alpha: Any) -> AttentionForm | None:
    form, share, scale = product(see, "bmm", (q, k), {}), see.number(beta), see.number(alpha)
    if form is None or share not in (0, 1) or scale is None or not 0 < scale < math.inf:
        return None
    form = replace(form, scale=float(scale))
    return form if share == 0 else _with_mask(see, form, "add", added, see.tensor(added).dtype)


def _einsum_product(see: ArgumentReader, args: Sequence[Any]) -> AttentionForm | None:
    found = _letters(see, args)
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
    batch = _broadcast(see, sizes[0][:-2], sizes[1][:-2])
    return (
        None
        if batch is None
        else AttentionForm(
            operands[q], operands[k], axes[0], axes[1], batch, batch, sizes[0][-2], sizes[1][-2]
        )
    )


def _letters(see: ArgumentReader, args: Sequence[Any]) -> tuple[list[Any], tuple[str, str], str] | None:
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


def _broadcast(see: ArgumentReader, one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...] | None:
    """Broadcast sizes as torch does; None if they do not fit."""
    length = max(len(one), len(other))
    pairs = zip((*[1] * (length - len(one)), *one), (*[1] * (length - len(other)), *other), strict=True)
    found = []
    for a, b in pairs:
        if not see.same(a, b) and not see.same(a, 1) and not see.same(b, 1):
            return None
        found.append(b if see.same(a, 1) else a)
    return tuple(found)


def _alike(see: ArgumentReader, one: Sequence[Any] | None, other: Sequence[Any]) -> bool:
    return one is not None and len(one) == len(other) and all(map(see.same, one, other))


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
    return found if found is not None and _alike(see, made.shape, found.shape) else None


def _scaled(inverse: bool) -> Callable[..., AttentionForm | None]:
    def scaled(
        see: ArgumentReader,
        form: AttentionForm,
        at: int,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        made: Any,
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
    return _with_mask(see, form, "add", args[1 - at], made.dtype) if len(args) == 2 and not kwargs else None


def _filled(
    see: ArgumentReader, form: AttentionForm, at: int, args: Sequence[Any], kwargs: dict[str, Any], made: Any
) -> AttentionForm | None:
    given = dict(zip(("self", "mask", "value"), args, strict=False)) | kwargs
    return (
        _with_mask(see, form, "drop", given.get("mask"), made.dtype, see.number(given.get("value")))
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
    return _with_mask(see, form, kind, condition, made.dtype, see.number(fill))


def _with_mask(
    see: ArgumentReader,
    form: AttentionForm,
    kind: str,
    tensor: Any,
    dtype: torch.dtype,
    fill: float | None = -math.inf,
) -> AttentionForm | None:
    mask = see.tensor(tensor)
    if mask is None or form.is_weights or fill is None or fill > MASKED:
        return None
    if not _alike(see, _broadcast(see, mask.shape, form.shape), form.shape):
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
        if _alike(see, form.masked, form.batch)
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


def _weighed(
    see: ArgumentReader, form: AttentionForm, at: int, args: Sequence[Any], kwargs: dict[str, Any], made: Any
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
    see: ArgumentReader, form: AttentionForm, at: int, args: Sequence[Any], kwargs: dict[str, Any], made: Any
) -> AttentionForm | None:
    return None if drops(see, "dropout", args, kwargs) else form


def _unchanged(
    see: ArgumentReader, form: AttentionForm, at: int, args: Sequence[Any], kwargs: dict[str, Any], made: Any
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


def finished(
    see: ArgumentReader,
    name: str,
    form: AttentionForm,
    at: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    made: Any,
) -> AttentionMatch | None:
    """The whole attention, if this operator multiplies weights by values.

    ``made`` has the dtype of the result.
    """
    if not form.is_weights or kwargs or made.dtype is not form.dtype:
        return None
    if name == "einsum":
        found = _einsum_values(see, form, args, at)
    else:
        v = see.tensor(args[1]) if at == 0 and len(args) == 2 and name != "baddbmm" else None
        found = AttentionMatch(form, args[1], None, None) if v is not None and len(v.shape) >= 2 else None
    if found is None:
        return None
    shape = see.tensor(found.v).shape
    sizes = [shape[axis] for axis in found.v_axes or range(len(shape))]
    fits = (
        _alike(see, _broadcast(see, sizes[:-2], form.batch), form.batch)
        and see.same(sizes[-2], form.columns)
        and 0 < form.scale < math.inf
    )
    return found if fits else None


def _einsum_values(
    see: ArgumentReader, form: AttentionForm, args: Sequence[Any], at: int
) -> AttentionMatch | None:
    found = _letters(see, args)
    if found is None:
        return None
    operands, letters, out = found
    weights, values = letters[at - 1], letters[2 - at]
    batch, rows, columns = weights[:-2], weights[-2], weights[-1]
    width = set(values) - set(batch) - {columns}
    if (
        len(width) != 1
        or rows in values
        or not {*batch, columns} < set(values)
        or set(out) != {*batch, rows, *width}
        or len(out) != len(weights)
    ):
        return None
    result = (*batch, rows, *width)
    return AttentionMatch(
        form,
        operands[2 - at],
        tuple(values.index(each) for each in (*batch, columns, *width)),
        tuple(result.index(each) for each in out),
    )


def causal_and_whole(form: AttentionForm) -> tuple[bool, bool]:
    """Whether the only mask of this form is causal, and whether it keeps something in every row.

    Reads its values.
    """
    mask = form.masks[0]
    with torch.no_grad():
        kept = (
            ~mask.tensor if mask.kind == "drop" else mask.tensor if mask.kind == "keep" else mask.tensor == 0
        )
        some = kept if mask.kind != "add" else mask.tensor > MASKED
        whole, causal = bool(some.any(-1).all()) if some.dim() else bool(some), False
        if (
            form.rows == form.columns
            and kept.shape[-2:] == (form.rows, form.columns)
            and kept.numel() == form.rows * form.columns
        ):
            square = kept.reshape(form.rows, form.columns)
            causal = torch.equal(square, torch.ones_like(square).tril()) and (
                mask.kind != "add" or bool((kept | (mask.tensor <= MASKED)).all())
            )
    return causal, whole


def attend(see: ArgumentReader, whole: AttentionMatch, causal: bool = False, checked: bool = False) -> Any:
    """The result of the script's operators, up to rounding; contiguous before its axes are reordered.

    ``causal``: the masks are known to exclude exactly the entries above the diagonal. ``checked``: no row is
    known to be fully masked.
    """
    form = whole.form
    work = form.masked if form.masks else form.batch
    width, width_v = (
        see.tensor(each).shape[-1 if axes is None else axes[-1]]
        for each, axes in ((form.q, form.q_axes), (whole.v, whole.v_axes))
    )
    q = _placed(see, form.q, form.q_axes, form.dtype, form.first, work, (form.rows, width))
    k = _placed(see, form.k, form.k_axes, form.dtype, form.first, work, (form.columns, width))
    v = _placed(see, whole.v, whole.v_axes, form.dtype, form.batch, work, (form.columns, width_v))
    mask, even, nowhere = (None, None, None) if causal else _mask(see, form, work, checked)
    if even is not None:
        q = q.masked_fill(even, 0.0)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=form.scale)
    if nowhere is not None and any(mask.kind == "add" for mask in form.masks):
        out = out * torch.where(nowhere, math.nan, 1.0).to(form.dtype)
    elif nowhere is not None:  # excluded scores pass on no gradient, so only values get a NaN gradient
        out = torch.where(
            nowhere,
            v.sum(-2, keepdim=True)
            * torch.where(nowhere.any(-2, keepdim=True), math.nan, 0.0).to(form.dtype),
            out,
        )
    out = out.contiguous()
    if len(work) != 2 or not _alike(see, work, form.batch):
        out = out.reshape(*form.batch, form.rows, width_v)
    return out if whole.axes is None else out.permute(whole.axes)


def _placed(
    see: ArgumentReader,
    thing: Any,
    axes: tuple[int, ...] | None,
    dtype: torch.dtype,
    batch: Sequence[Any],
    work: Sequence[Any],
    last: tuple[Any, Any],
) -> Any:
    """The tensor as [N, H, length, width], in the type of the products."""
    tensor, known = thing, see.tensor(thing)
    order = tuple(axes or range(len(known.shape)))
    if order != tuple(range(len(order))):
        tensor = (
            tensor.transpose(-2, -1)
            if order == (*range(len(order) - 2), len(order) - 1, len(order) - 2)
            else tensor.permute(order)
        )
    if known.dtype is not dtype:
        tensor = tensor.to(dtype)
    if not _alike(see, [known.shape[axis] for axis in order[:-2]], batch):
        tensor = tensor.expand(*batch, *last)
    if not _alike(see, batch, work):
        tensor = tensor.reshape(*work, *last)
    if len(work) > 2:
        return tensor.reshape(work[0], -1, *last)
    return tensor if len(work) == 2 else tensor.unsqueeze(1) if len(work) == 1 else tensor[None, None]


def _mask(
    see: ArgumentReader, form: AttentionForm, work: Sequence[Any], checked: bool
) -> tuple[Any, Any, Any]:
    """The added or boolean mask; rows in which all columns weigh the same; rows that are NaN.

    The last two are [..., rows or 1, 1].
    """
    out, added, fill = None, None, -math.inf
    in_type, sizes = True, (1, 1)
    for mask in form.masks:
        known = see.tensor(mask.tensor)
        tensor = mask.tensor if len(known.shape) == len(mask.sizes) else mask.tensor.reshape(mask.sizes)
        sizes = _broadcast(see, mask.sizes, sizes) or sizes
        if mask.kind != "add":
            out, fill = _either(out, tensor if mask.kind == "drop" else ~tensor), mask.fill
            continue
        if out is not None:
            added, out, in_type = (
                torch.where(out, fill, 0.0) if added is None else added.masked_fill(out, fill),
                None,
                False,
            )
        added, in_type = tensor if added is None else added + tensor, in_type and known.dtype is form.dtype
    found, even, nowhere = out, None, None
    if added is not None:
        found = added if out is None else added.masked_fill(out, fill)
        if not checked:
            most = found.detach().amax(-1, keepdim=True)
            nowhere = most == -math.inf
            even = (most <= max(DROWNING[mask.dtype] for mask in form.masks)) & ~nowhere
            found = (found - most).masked_fill(nowhere, 0.0)
        found = found if in_type else found.to(form.dtype).clamp(min=torch.finfo(form.dtype).min)
    elif out is not None:
        nothing = None if checked else out.all(-1, keepdim=True)
        found = ~out if nothing is None else ~out | nothing
        even, nowhere = (nothing, None) if fill > -math.inf else (None, nothing)
    rows = (*sizes[:-1], 1)
    return (
        _of_four_axes(found, sizes, work),
        _of_four_axes(even, rows, work),
        _of_four_axes(nowhere, rows, work),
    )


def _either(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one | other


def _of_four_axes(mask: Any, sizes: Sequence[Any], work: Sequence[Any]) -> Any:
    """A mask for scores [*work, rows, columns], as the kernel expects it for [N, H, rows, columns].

    The result has two to four axes.
    """
    if mask is None or len(sizes) <= 2 or (len(sizes) <= 4 and len(work) == 2):
        return mask[None] if mask is not None and len(sizes) == 1 else mask
    if len(work) == 1:
        return mask.unsqueeze(1)
    whole = (*[1] * (len(work) + 2 - len(sizes)), *sizes)
    if all(size == 1 for size in whole[1:-2]):
        return mask.reshape(whole[0], 1, *whole[-2:])
    return mask.expand(whole[0], *work[1:], *whole[-2:]).reshape(whole[0], -1, *whole[-2:])
