"""Calculates a recognised attention with torch's fused kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from flatout.kernels.attention_products import DROWNING, MASKED, alike, broadcast, einsum_letters
from flatout.kernels.attention_reading import ArgumentReader, AttentionForm, AttentionMatch

if TYPE_CHECKING:
    from torch import Tensor


def finished(
    see: ArgumentReader,
    name: str,
    form: AttentionForm,
    at: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    made: Tensor,
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
        alike(see, broadcast(see, sizes[:-2], form.batch), form.batch)
        and see.same(sizes[-2], form.columns)
        and 0 < form.scale < math.inf
    )
    return found if fits else None


def _einsum_values(
    see: ArgumentReader, form: AttentionForm, args: Sequence[Any], at: int
) -> AttentionMatch | None:
    found = einsum_letters(see, args)
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
    if len(work) != 2 or not alike(see, work, form.batch):
        out = out.reshape(*form.batch, form.rows, width_v)
    return out if whole.axes is None else out.permute(whole.axes)


def _placed(
    see: ArgumentReader,
    thing: Tensor,
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
    if not alike(see, [known.shape[axis] for axis in order[:-2]], batch):
        tensor = tensor.expand(*batch, *last)
    if not alike(see, batch, work):
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
        sizes = broadcast(see, mask.sizes, sizes) or sizes
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


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one | other


def _of_four_axes(mask: Tensor, sizes: Sequence[Any], work: Sequence[Any]) -> Any:
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
