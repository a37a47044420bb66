"""Recognise hand-written attention operator by operator.

    product of queries and keys -> [scale] -> [masks] -> softmax over the last axis -> [inactive dropout] ->
    product with the values

An ``AttentionForm`` records how scores or weights are computed. ``scores_form`` starts one, ``extend_form``
adds an operator, and ``match_attention`` adds the product with the values. Operators are identified by name,
so the same code reads calls of torch in a running program (``attention_deferred``) and nodes of a graph
(``attention_graphs``). An ``ArgumentReader`` interprets an argument in either. None means: this is not
attention, or not known to be equivalent.

In a row that keeps something, a score of -10,000 or less has weight zero, as minus infinity has. ``attend`` keeps
the result of a row that is masked completely.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

# Methods and functions that change their first argument.
IN_PLACE_NAME = re.compile(
    r"(?!__)\w+_|(__)?(set|setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))(__)?"
)
PRODUCTS = frozenset(("matmul", "mm", "bmm", "baddbmm", "einsum", "__matmul__"))
MASKED_SCORE = -1e4  # at most this score, softmax in float32 gives a weight of exactly zero next to any other
# Numbers that absorb a score of a few: their sum is the number itself, in each type.
ABSORBING_VALUES = {torch.float16: -3e4, torch.bfloat16: -8e3, torch.float32: -1e8, torch.float64: -1e17}


class ArgumentReader(Protocol):
    """Interprets an argument."""

    def tensor(self, arg: object) -> Any:
        """An object with the shape, dtype and device of this tensor; None if it is not a tensor."""

    def number(self, arg: object) -> float | None:
        """The value of a number, also in a tensor, if it is known."""

    def same(self, left: object, right: object) -> bool:
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
    product. ``mask_batch`` are the batch sizes at which the masks were applied, ``product_batch`` those of the
    product.
    """

    q: Tensor
    k: Tensor
    q_axes: tuple[int, ...] | None
    k_axes: tuple[int, ...] | None
    product_batch: tuple[Any, ...]
    batch: tuple[Any, ...]
    rows: Any
    columns: Any
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    mask_batch: tuple[Any, ...] = ()
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
    """One call of an operator, with scores or weights as argument number ``score_index``.

    ``result`` has the shape and dtype of the result.
    """

    reader: ArgumentReader
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    score_index: int
    result: Any


# -- the product of queries and keys


def unpack_operands(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Unpack the operand list that torch.einsum also accepts."""
    listed = name == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple))
    return (args[0], *args[1]) if listed else args


def scores_form(
    reader: ArgumentReader, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> AttentionForm | None:
    """The form that this product may start. The caller, who knows the result, sets ``dtype``."""
    if name == "einsum":
        return _einsum_product(reader, args) if not kwargs else None
    if name == "baddbmm":
        arguments = (
            dict(zip(("input", "batch1", "batch2"), args, strict=False)) | {"beta": 1, "alpha": 1} | kwargs
        )
        return _baddbmm(reader, **arguments) if len(arguments) == 5 else None
    if len(args) != 2 or kwargs:
        return None
    q, k = map(reader.tensor, args)
    if q is None or k is None or min(len(q.shape), len(k.shape)) < 2:
        return None
    batch, last = broadcast(reader, q.shape[:-2], k.shape[:-2]), len(k.shape) - 1
    if batch is None or not reader.same(q.shape[-1], k.shape[-2]):
        return None
    swapped = (*range(last - 1), last, last - 1)
    return AttentionForm(args[0], args[1], None, swapped, batch, batch, q.shape[-2], k.shape[-1])


def _baddbmm(
    reader: ArgumentReader, input: Tensor, batch1: Tensor, batch2: Tensor, beta: object, alpha: object
) -> AttentionForm | None:
    form = scores_form(reader, "bmm", (batch1, batch2), {})
    beta_value, scale = reader.number(beta), reader.number(alpha)
    if form is None or beta_value not in (0, 1) or scale is None or not 0 < scale < math.inf:
        return None
    form = replace(form, scale=float(scale))
    return form if beta_value == 0 else with_mask(reader, form, "add", input, reader.tensor(input).dtype)


def _einsum_product(reader: ArgumentReader, args: Sequence[Any]) -> AttentionForm | None:
    parsed = einsum_letters(reader, args)
    if parsed is None:
        return None
    operands, letters, out = parsed
    left, right = map(set, letters)
    summed = (left & right) - set(out)
    if len(out) < 2 or len(summed) != 1 or left | right != set(out) | summed:
        return None
    rows, columns = out[-2], out[-1]
    q, k = (0, 1) if rows in left else (1, 0)
    if rows in letters[k] or columns in letters[q] or not set(out[:-2]) <= left & right:
        return None
    axes, sizes = [], []
    for operand, free in ((q, rows), (k, columns)):
        axes.append(tuple(letters[operand].index(letter) for letter in (*out[:-2], free, *summed)))
        sizes.append([reader.tensor(operands[operand]).shape[axis] for axis in axes[-1]])
    batch = broadcast(reader, sizes[0][:-2], sizes[1][:-2])
    if batch is None:
        return None
    return AttentionForm(operands[q], operands[k], axes[0], axes[1], batch, batch, sizes[0][-2], sizes[1][-2])


def einsum_letters(
    reader: ArgumentReader, args: Sequence[Any]
) -> tuple[list[Any], tuple[str, str], str] | None:
    """Operands, their letters, and the letters of the result; an ellipsis gets its own letters."""
    if len(args) != 3 or not isinstance(args[0], str) or args[0].count("->") != 1:
        return None
    inputs, out = args[0].replace(" ", "").split("->")
    operands, terms = list(args[1:]), inputs.split(",")
    tensors = list(map(reader.tensor, operands))
    if len(terms) != 2 or any(tensor is None for tensor in tensors):
        return None
    dims = [len(tensor.shape) for tensor in tensors]
    extra_axes = max(count - len(term.replace("...", "")) for term, count in zip(terms, dims, strict=True))
    digits = "0123456789"[: max(extra_axes, 0)] if "..." in inputs else ""
    left, right = (term.replace("...", digits) for term in terms)
    if [len(set(left)), len(set(right))] != dims or [len(left), len(right)] != dims:
        return None  # a diagonal, or ellipses of different lengths
    return operands, (left, right), out.replace("...", digits)


def broadcast(reader: ArgumentReader, left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, ...] | None:
    """Broadcast sizes as torch does; None if they do not fit."""
    length = max(len(left), len(right))
    sizes = []
    for a, b in zip(
        (*[1] * (length - len(left)), *left), (*[1] * (length - len(right)), *right), strict=True
    ):
        if not reader.same(a, b) and not reader.same(a, 1) and not reader.same(b, 1):
            return None
        sizes.append(b if reader.same(a, 1) else a)
    return tuple(sizes)


def same_sizes(reader: ArgumentReader, left: Sequence[Any] | None, right: Sequence[Any]) -> bool:
    return left is not None and len(left) == len(right) and all(map(reader.same, left, right))


# -- masks


def with_mask(
    reader: ArgumentReader,
    form: AttentionForm,
    kind: str,
    tensor: Tensor,
    dtype: torch.dtype,
    fill: float | None = -math.inf,
) -> AttentionForm | None:
    mask = reader.tensor(tensor)
    if mask is None or form.is_weights or fill is None or fill > MASKED_SCORE:
        return None
    if not same_sizes(reader, broadcast(reader, mask.shape, form.shape), form.shape):
        return None
    if kind == "add":
        fits = mask.dtype is form.dtype or (mask.dtype, form.dtype) == (torch.float32, torch.bfloat16)
    else:
        fills = {other.fill for other in form.masks if other.kind != "add"}
        fits = mask.dtype is torch.bool and fills <= {fill}
    if not fits:
        return None
    masks = [*form.masks, Mask(kind, tensor, fill, dtype, tuple(mask.shape))]
    if not same_sizes(reader, form.mask_batch, form.batch):
        for index, earlier in enumerate(form.masks):
            moved = _with_batch(earlier, form.mask_batch, form.batch)
            if moved is None:
                return None
            masks[index] = moved
    # Together with an added mask, excluded scores must not depend on their former values.
    if len({mask.kind == "add" for mask in masks}) == 2 and any(
        mask.fill > ABSORBING_VALUES[mask.dtype] for mask in masks
    ):
        return None
    return replace(form, masks=tuple(masks), mask_batch=form.batch)


def _with_batch(mask: Mask, old: Sequence[Any], new: Sequence[Any]) -> Mask | None:
    """The mask at other batch axes, derived from the old ones by a view; None if it would need to grow."""
    if not all(isinstance(size, int) and size > 0 for size in (*old, *new, *mask.sizes)):
        return None
    sizes = (*[1] * (len(old) + 2 - len(mask.sizes)), *mask.sizes)
    moved: list[int] = []
    i = j = 0
    while i < len(old) or j < len(new):
        old_start, new_start = i, j
        old_size, new_size = math.prod(old[i : i + 1]), math.prod(new[j : j + 1])
        i, j = i + 1, j + 1
        while old_size != new_size:
            if old_size < new_size:
                old_size, i = old_size * old[i], i + 1
            else:
                new_size, j = new_size * new[j], j + 1
        if all(size == 1 for size in sizes[old_start:i]):
            moved += [1] * len(new[new_start:j])
        elif tuple(sizes[old_start:i]) == tuple(old[old_start:i]):
            moved += new[new_start:j]
        else:
            return None
    return replace(mask, sizes=(*moved, *sizes[-2:]))


# -- operators in between


def extend_form(form: AttentionForm, call: Call) -> AttentionForm | None:
    """The form of this call's result."""
    change = FORM_UPDATES.get(call.name)
    if change is None or not call.result.dtype.is_floating_point:
        return None
    extended = change(form, call)
    return (
        extended
        if extended is not None and same_sizes(call.reader, call.result.shape, extended.shape)
        else None
    )


def _scaled(form: AttentionForm, call: Call) -> AttentionForm | None:
    inverse = "div" in call.name
    if len(call.args) != 2 or call.kwargs or (inverse and call.score_index):
        return None
    factor = call.reader.number(call.args[1 - call.score_index])
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
    return with_mask(call.reader, form, "add", call.args[1 - call.score_index], call.result.dtype)


def _masked_fill(form: AttentionForm, call: Call) -> AttentionForm | None:
    arguments = dict(zip(("self", "mask", "value"), call.args, strict=False)) | call.kwargs
    if call.score_index != 0 or len(arguments) != 3:
        return None
    fill = call.reader.number(arguments.get("value"))
    return with_mask(call.reader, form, "drop", arguments.get("mask"), call.result.dtype, fill)


def _where(form: AttentionForm, call: Call) -> AttentionForm | None:
    if len(call.args) != 3 or call.kwargs:
        return None
    one, two, three = call.args
    mask, fill, kind = {0: (two, three, "keep"), 1: (one, three, "keep"), 2: (one, two, "drop")}[
        call.score_index
    ]
    return with_mask(call.reader, form, kind, mask, call.result.dtype, call.reader.number(fill))


def _softmax(form: AttentionForm, call: Call) -> AttentionForm | None:
    axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    on_last_axis = isinstance(axis, int) and axis in (-1, len(form.shape) - 1)
    known_arguments = call.kwargs.keys() <= {"dim", "dtype", "_stacklevel"}
    return (
        replace(form, is_weights=True) if on_last_axis and known_arguments and not form.is_weights else None
    )


def is_active_dropout(call: Call) -> bool:
    """Whether this is a dropout that draws random numbers."""
    if call.name != "dropout":
        return False
    arguments = dict(zip(("input", "p", "training"), call.args, strict=False))
    arguments = {"p": 0.5, "training": True, "train": True} | arguments | call.kwargs
    return bool(arguments["training"] and arguments["train"]) and call.reader.number(arguments["p"]) != 0


def _unchanged(form: AttentionForm, call: Call) -> AttentionForm | None:
    return form if call.score_index == 0 and not is_active_dropout(call) else None


def _reshaped(form: AttentionForm, call: Call) -> AttentionForm | None:
    """Other batch axes in front of the same last two axes."""
    shape = call.result.shape
    same_scores = call.score_index == 0 and same_sizes(call.reader, shape[-2:], (form.rows, form.columns))
    return replace(form, batch=tuple(shape[:-2])) if same_scores else None


FORM_UPDATES: dict[str, Callable[[AttentionForm, Call], AttentionForm | None]] = {
    **dict.fromkeys(("mul", "multiply", "mul_", "imul"), _scaled),
    **dict.fromkeys(("div", "true_divide", "div_", "truediv", "itruediv"), _scaled),
    **dict.fromkeys(("add", "add_", "iadd"), _added),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked_fill),
    "where": _where,
    "softmax": _softmax,
    **dict.fromkeys(("float", "half", "bfloat16", "double", "to", "type", "type_as"), _unchanged),
    **dict.fromkeys(("contiguous", "dropout"), _unchanged),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"), _reshaped),
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


# -- the product with the values


def match_attention(form: AttentionForm, call: Call) -> AttentionMatch | None:
    """The whole attention, if this call multiplies weights by values."""
    reader, args = call.reader, call.args
    if not form.is_weights or call.kwargs or call.result.dtype is not form.dtype:
        return None
    if call.name == "einsum":
        match = _einsum_values(form, call)
    else:
        v = (
            reader.tensor(args[1])
            if call.score_index == 0 and len(args) == 2 and call.name != "baddbmm"
            else None
        )
        match = AttentionMatch(form, args[1]) if v is not None and len(v.shape) >= 2 else None
    if match is None:
        return None
    shape = reader.tensor(match.v).shape
    sizes = [shape[axis] for axis in match.v_axes or range(len(shape))]
    fits = (
        same_sizes(reader, broadcast(reader, sizes[:-2], form.batch), form.batch)
        and reader.same(sizes[-2], form.columns)
        and 0 < form.scale < math.inf
    )
    return match if fits else None


def _einsum_values(form: AttentionForm, call: Call) -> AttentionMatch | None:
    parsed = einsum_letters(call.reader, call.args)
    if parsed is None:
        return None
    operands, letters, out = parsed
    weights, values = letters[call.score_index - 1], letters[2 - call.score_index]
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
    return AttentionMatch(form, operands[2 - call.score_index], v_axes, tuple(map(result.index, out)))
