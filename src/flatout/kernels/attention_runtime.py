"""What the operators of a running program get and return: arguments, shapes of results, masks that stay constant."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from flatout.kernels.attention_forms import (
    ABSORBING_VALUES,
    MASKED_SCORE,
    ArgumentReader,
    AttentionForm,
    AttentionMatch,
    broadcast,
    same_sizes,
)

# Calculate a recognised attention with torch's fused kernel.
#
# Fully masked rows keep their result. If the masked scores are minus infinity, softmax gives NaN, and so does
# this. If they are a large negative number that absorbs the scores, all columns weigh the same: such a row gets
# a query of zeros. The kernel sees neither case: the added mask is shifted row by row, which softmax ignores,
# and rows that keep nothing keep everything.


def mask_properties(form: AttentionForm) -> tuple[bool, bool]:
    """Whether the only mask of this form is causal, and whether it keeps something in every row.

    Reads its values.
    """
    (mask,), size = form.masks, form.rows
    with torch.no_grad():
        if mask.kind == "add":
            unmasked, finite = mask.tensor == 0, mask.tensor > MASKED_SCORE
            masked = mask.tensor <= MASKED_SCORE
        else:
            unmasked = finite = ~mask.tensor if mask.kind == "drop" else mask.tensor
            masked = ~unmasked
        no_empty_rows, causal = bool(finite.any(-1).all() if finite.dim() else finite), False
        if unmasked.shape[-2:] == (size, form.columns) == (size, size) and unmasked.numel() == size * size:
            square = unmasked.reshape(size, size)
            causal = square.equal(torch.ones_like(square).tril()) and bool((unmasked | masked).all())
    return causal, no_empty_rows


def attend(
    reader: ArgumentReader, match: AttentionMatch, causal: bool = False, no_empty_rows: bool = False
) -> Any:
    """The result of the script's operators, up to rounding; contiguous before its axes are reordered.

    ``causal``: the masks exclude exactly the entries above the diagonal. ``no_empty_rows``: no row is fully
    masked.
    """
    form = match.form
    work_batch = form.mask_batch if form.masks else form.batch

    def to_4d(tensor: Tensor, axes: tuple[int, ...] | None, batch: Sequence[Any], length: Any) -> Any:
        """The tensor as [N, H, length, width], in the type of the products."""
        meta = reader.tensor(tensor)
        order = tuple(axes or range(len(meta.shape)))
        last_sizes = (length, meta.shape[order[-1]])
        if order != tuple(range(len(order))):
            tensor = tensor.permute(order)
        if meta.dtype is not form.dtype:
            tensor = tensor.to(form.dtype)
        if not same_sizes(reader, [meta.shape[axis] for axis in order[:-2]], batch):
            tensor = tensor.expand(*batch, *last_sizes)
        if not same_sizes(reader, batch, work_batch):
            tensor = tensor.reshape(*work_batch, *last_sizes)
        if len(work_batch) > 2:
            return tensor.reshape(work_batch[0], -1, *last_sizes)
        if len(work_batch) == 2:
            return tensor
        return tensor.unsqueeze(1) if work_batch else tensor[None, None]

    q = to_4d(form.q, form.q_axes, form.product_batch, form.rows)
    k = to_4d(form.k, form.k_axes, form.product_batch, form.columns)
    v = to_4d(match.v, match.v_axes, form.batch, form.columns)
    mask, uniform_rows, nan_rows = (
        (None, None, None) if causal else _mask(reader, form, work_batch, no_empty_rows)
    )
    if uniform_rows is not None:
        q = q.masked_fill(uniform_rows, 0.0)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=form.scale)
    if nan_rows is not None and any(mask.kind == "add" for mask in form.masks):
        out = out * torch.where(nan_rows, math.nan, 1.0).to(form.dtype)
    elif nan_rows is not None:  # excluded scores pass on no gradient, so only values get a NaN gradient
        nan = torch.where(nan_rows.any(-2, keepdim=True), math.nan, 0.0).to(form.dtype)
        out = torch.where(nan_rows, v.sum(-2, keepdim=True) * nan, out)
    out = out.contiguous()
    if len(work_batch) != 2 or not same_sizes(reader, work_batch, form.batch):
        width = reader.tensor(match.v).shape[-1 if match.v_axes is None else match.v_axes[-1]]
        out = out.reshape(*form.batch, form.rows, width)
    return out if match.axes is None else out.permute(match.axes)


def _mask(
    reader: ArgumentReader, form: AttentionForm, work_batch: Sequence[Any], no_empty_rows: bool
) -> tuple[Any, Any, Any]:
    """The added or boolean mask; rows in which all columns weigh the same; rows that are NaN.

    The last two are [..., rows or 1, 1].
    """
    excluded, bias, fill = None, None, -math.inf
    same_dtype, sizes = True, (1, 1)
    for mask in form.masks:
        meta = reader.tensor(mask.tensor)
        tensor = mask.tensor if len(meta.shape) == len(mask.sizes) else mask.tensor.reshape(mask.sizes)
        sizes = broadcast(reader, mask.sizes, sizes) or sizes
        if mask.kind != "add":
            tensor = tensor if mask.kind == "drop" else ~tensor
            excluded, fill = tensor if excluded is None else excluded | tensor, mask.fill
            continue
        if excluded is not None:
            bias = torch.where(excluded, fill, 0.0) if bias is None else bias.masked_fill(excluded, fill)
            excluded, same_dtype = None, False
        bias, same_dtype = tensor if bias is None else bias + tensor, same_dtype and meta.dtype is form.dtype
    combined, uniform_rows, nan_rows = excluded, None, None
    if bias is not None:
        combined = bias if excluded is None else bias.masked_fill(excluded, fill)
        if not no_empty_rows:
            row_max = combined.detach().amax(-1, keepdim=True)
            nan_rows = row_max == -math.inf
            uniform_rows = (row_max <= max(ABSORBING_VALUES[mask.dtype] for mask in form.masks)) & ~nan_rows
            combined = (combined - row_max).masked_fill(nan_rows, 0.0)
        combined = combined if same_dtype else combined.to(form.dtype).clamp(min=torch.finfo(form.dtype).min)
    elif excluded is not None:
        empty_rows = None if no_empty_rows else excluded.all(-1, keepdim=True)
        combined = ~excluded if empty_rows is None else ~excluded | empty_rows
        uniform_rows, nan_rows = (empty_rows, None) if fill > -math.inf else (None, empty_rows)
    row_sizes = (*sizes[:-1], 1)
    results = ((combined, sizes), (uniform_rows, row_sizes), (nan_rows, row_sizes))
    combined, uniform_rows, nan_rows = (
        None if mask is None else _to_4d_mask(mask, mask_sizes, work_batch) for mask, mask_sizes in results
    )
    return combined, uniform_rows, nan_rows


def _to_4d_mask(mask: Tensor, sizes: Sequence[Any], work_batch: Sequence[Any]) -> Any:
    """A mask for scores [*work, rows, columns], as the kernel expects it for [N, H, rows, columns].

    The result has two to four axes.
    """
    if len(sizes) <= 2 or (len(sizes) <= 4 and len(work_batch) == 2):
        return mask[None] if len(sizes) == 1 else mask
    if len(work_batch) == 1:
        return mask.unsqueeze(1)
    padded = (*[1] * (len(work_batch) + 2 - len(sizes)), *sizes)
    if all(size == 1 for size in padded[1:-2]):
        return mask.reshape(padded[0], 1, *padded[-2:])
    return mask.expand(padded[0], *work_batch[1:], *padded[-2:]).reshape(padded[0], -1, *padded[-2:])


MAX_CACHED_RESULTS = 4096
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


class RuntimeArguments:
    """Reads arguments of a running program. ``numbers`` maps tensors on a device to their known values."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    def tensor(self, arg: object) -> Any:
        return arg if isinstance(arg, Tensor) else None

    def number(self, arg: object) -> float | None:
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return float(arg)
        if (
            not isinstance(arg, Tensor)
            or type(arg) not in PLAIN_TENSORS
            or arg.dim()
            or arg.requires_grad
            or arg.is_complex()
        ):
            return None
        return float(arg) if arg.device.type == "cpu" else self._numbers.get(arg)

    def same(self, left: object, right: object) -> bool:
        return bool(left == right)


def is_usable_later(arg: Tensor) -> bool:
    """Whether this tensor can be used later: an optimizer changes weights, nothing is expected to change others."""
    if type(arg) not in PLAIN_TENSORS or arg.is_inference():
        return False
    base = arg if arg._base is None else arg._base
    return not (base.requires_grad and base.is_leaf)


def autocast_state(device: torch.device) -> tuple[str, torch.dtype, bool]:
    return device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)


_empty_results: dict[Any, Tensor | None] = {}


def empty_result(
    function: Callable[..., Any],
    device: torch.device,
    keeps_dtype: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor | None:
    """A tensor without memory with the shape, strides and type of the operator's result.

    None if the operator returns no tensor, or fails. Sizes are computed on the meta device; the type is
    determined by the operator itself, from tiny tensors, under the present autocast.
    """
    autocast = autocast_state(device)
    try:
        key = (function, _key(args), _key(tuple(sorted(kwargs.items()))), autocast)
        if key in _empty_results:
            return _empty_results[key]
    except TypeError:  # an argument that cannot be hashed
        return None
    if len(_empty_results) >= MAX_CACHED_RESULTS:
        _empty_results.clear()
    _empty_results[key] = None
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            with torch.autocast(*autocast[:2], enabled=False):
                meta_args, meta_kwargs = tree_map_only(Tensor, _without_memory, (args, kwargs))
                result = function(*meta_args, **meta_kwargs)
            dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
            if not keeps_dtype:
                tiny_args, tiny_kwargs = tree_map_only(Tensor, _tiny, (args, kwargs))
                dtype = function(*tiny_args, **tiny_kwargs).dtype
        except Exception:  # the real call fails in the script
            return None
    _empty_results[key] = torch.empty_strided(result.shape, result.stride(), dtype=dtype, device="meta")
    return _empty_results[key]


def _without_memory(tensor: Tensor) -> Tensor:
    """All floating types count as one here; ``empty_result`` determines the type under autocast separately."""
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _tiny(tensor: Tensor) -> Tensor:
    """Axes of two, because products over an axis of one are computed differently."""
    return torch.zeros((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def _key(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype, arg.device
    return tuple(map(_key, arg)) if isinstance(arg, (list, tuple)) else (type(arg), arg)


# Operators that make masks of constants and of other masks.
MASK_OPERATORS = re.compile(
    "__(getitem|eq|ne|and|or|invert|rsub)__|getitem|eq|ne|and_|or_|invert|inv|lt|le|gt|ge|sub|mul|neg|bool|"
    "(logical|bitwise)_(not|or|and)|to|type|float|tril|triu|ones|zeros|full|arange|view|unsqueeze|squeeze|expand|masked_fill|tensor"
)


class MaskRegistry:
    """Names for the values of tensors: tensors with one name have the same values.

    The kind of a mask is determined once per name.
    """

    def __init__(self) -> None:
        self.numbers = WeakIdKeyDictionary()  # tensors of one number
        self._names = WeakIdKeyDictionary()
        self._serials = WeakIdKeyDictionary()
        self._count = 0
        self._recent_names: tuple[set[Any], set[Any]] = set(), set()  # in earlier steps, in this step
        self._pending: dict[Any, AttentionForm] = {}
        self._properties: dict[Any, tuple[bool, bool]] = {}

    def step(self) -> None:
        """Between two steps, when no graph of the forward pass is being recorded: read values now."""
        self._recent_names = self._recent_names[1], set()
        self._properties |= {name: mask_properties(form) for name, form in self._pending.items()}
        self._pending.clear()

    def call_and_name(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function and name its result."""
        result = function(*args, **kwargs)
        if type(result) is Tensor and not result.requires_grad:
            try:
                recipe = (
                    name,
                    *(self._name_of(arg) for arg in args),
                    *((key, self._name_of(kwargs[key])) for key in sorted(kwargs)),
                )
                hash(recipe)
            except TypeError:
                return result
            self._names[result] = recipe, result._version
            value = {"full": (*args[1:2], kwargs.get("fill_value"))[0], "tensor": (*args[:1], None)[0]}.get(
                name
            )
            if isinstance(value, (int, float)) and not result.dim() and result.is_floating_point():
                self.numbers[result] = float(value)
        return result

    def _name_of(self, value: object) -> Any:
        if isinstance(value, Tensor):
            if value.requires_grad or type(value) not in PLAIN_TENSORS or value.is_inference():
                raise TypeError
            recipe, version = self._names.get(value, (None, 0))
            if recipe is not None and version == value._version:
                return recipe
            if value not in self._serials:
                self._count += 1
                self._serials[value] = self._count
            return self._serials[value], value._version
        if isinstance(value, slice):
            return slice, self._name_of(value.start), self._name_of(value.stop), self._name_of(value.step)
        return tuple(map(self._name_of, value)) if isinstance(value, (list, tuple)) else (type(value), value)

    def properties(self, form: AttentionForm) -> tuple[bool, bool]:
        """Whether the masks of this form are one causal mask, and whether no row is fully masked.

        Both are False while unknown.
        """
        if len(form.masks) != 1 or form.masks[0].tensor.requires_grad:
            return False, False
        mask = form.masks[0]
        try:
            name = mask.kind, form.rows, form.columns, self._name_of(mask.tensor)
        except TypeError:
            return False, False
        self._recent_names[1].add(name)
        if name not in self._properties and name in self._recent_names[0]:
            self._pending[name] = replace(form, q=None, k=None)
        return self._properties.get(name, (False, False))
