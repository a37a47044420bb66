"""Calculate a recognised attention with torch's fused kernel.

Fully masked rows keep their result. If the masked scores are minus infinity, softmax gives NaN, and so does
this. If they are a large negative number that absorbs the scores, all columns weigh the same: such a row gets
a query of zeros. The kernel sees neither case: the added mask is shifted row by row, which softmax ignores,
and rows that keep nothing keep everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from flatout.kernels.attention_forms import (
    DROWNING,
    MASKED,
    ArgumentReader,
    AttentionForm,
    AttentionMatch,
    alike,
    broadcast,
)

if TYPE_CHECKING:
    from torch import Tensor


def causal_and_whole(form: AttentionForm) -> tuple[bool, bool]:
    """Whether the only mask of this form is causal, and whether it keeps something in every row.

    Reads its values.
    """
    (mask,), size = form.masks, form.rows
    with torch.no_grad():
        if mask.kind == "add":
            kept, some, hidden = mask.tensor == 0, mask.tensor > MASKED, mask.tensor <= MASKED
        else:
            kept = some = ~mask.tensor if mask.kind == "drop" else mask.tensor
            hidden = ~kept
        whole, causal = bool(some.any(-1).all() if some.dim() else some), False
        if kept.shape[-2:] == (size, form.columns) == (size, size) and kept.numel() == size * size:
            square = kept.reshape(size, size)
            causal = square.equal(torch.ones_like(square).tril()) and bool((kept | hidden).all())
    return causal, whole


def attend(see: ArgumentReader, match: AttentionMatch, causal: bool = False, checked: bool = False) -> Any:
    """The result of the script's operators, up to rounding; contiguous before its axes are reordered.

    ``causal``: the masks are known to exclude exactly the entries above the diagonal. ``checked``: no row is
    known to be fully masked.
    """
    form = match.form
    work = form.masked if form.masks else form.batch

    def placed(tensor: Tensor, axes: tuple[int, ...] | None, batch: Sequence[Any], length: Any) -> Any:
        """The tensor as [N, H, length, width], in the type of the products."""
        known = see.tensor(tensor)
        order = tuple(axes or range(len(known.shape)))
        last = (length, known.shape[order[-1]])
        if order != tuple(range(len(order))):
            tensor = tensor.permute(order)
        if known.dtype is not form.dtype:
            tensor = tensor.to(form.dtype)
        if not alike(see, [known.shape[axis] for axis in order[:-2]], batch):
            tensor = tensor.expand(*batch, *last)
        if not alike(see, batch, work):
            tensor = tensor.reshape(*work, *last)
        if len(work) > 2:
            return tensor.reshape(work[0], -1, *last)
        return tensor if len(work) == 2 else tensor.unsqueeze(1) if len(work) == 1 else tensor[None, None]

    q = placed(form.q, form.q_axes, form.first, form.rows)
    k = placed(form.k, form.k_axes, form.first, form.columns)
    v = placed(match.v, match.v_axes, form.batch, form.columns)
    mask, even, nowhere = (None, None, None) if causal else _mask(see, form, work, checked)
    if even is not None:
        q = q.masked_fill(even, 0.0)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=form.scale)
    if nowhere is not None and any(mask.kind == "add" for mask in form.masks):
        out = out * torch.where(nowhere, math.nan, 1.0).to(form.dtype)
    elif nowhere is not None:  # excluded scores pass on no gradient, so only values get a NaN gradient
        nan = torch.where(nowhere.any(-2, keepdim=True), math.nan, 0.0).to(form.dtype)
        out = torch.where(nowhere, v.sum(-2, keepdim=True) * nan, out)
    out = out.contiguous()
    if len(work) != 2 or not alike(see, work, form.batch):
        width = see.tensor(match.v).shape[-1 if match.v_axes is None else match.v_axes[-1]]
        out = out.reshape(*form.batch, form.rows, width)
    return out if match.axes is None else out.permute(match.axes)


def _mask(
    see: ArgumentReader, form: AttentionForm, work: Sequence[Any], checked: bool
) -> tuple[Any, Any, Any]:
    """The added or boolean mask; rows in which all columns weigh the same; rows that are NaN.

    The last two are [..., rows or 1, 1].
    """
    dropped, added, fill = None, None, -math.inf
    in_type, sizes = True, (1, 1)
    for mask in form.masks:
        known = see.tensor(mask.tensor)
        tensor = mask.tensor if len(known.shape) == len(mask.sizes) else mask.tensor.reshape(mask.sizes)
        sizes = broadcast(see, mask.sizes, sizes) or sizes
        if mask.kind != "add":
            tensor = tensor if mask.kind == "drop" else ~tensor
            dropped, fill = tensor if dropped is None else dropped | tensor, mask.fill
            continue
        if dropped is not None:
            added = torch.where(dropped, fill, 0.0) if added is None else added.masked_fill(dropped, fill)
            dropped, in_type = None, False
        added, in_type = tensor if added is None else added + tensor, in_type and known.dtype is form.dtype
    final, even, nowhere = dropped, None, None
    if added is not None:
        final = added if dropped is None else added.masked_fill(dropped, fill)
        if not checked:
            most = final.detach().amax(-1, keepdim=True)
            nowhere = most == -math.inf
            even = (most <= max(DROWNING[mask.dtype] for mask in form.masks)) & ~nowhere
            final = (final - most).masked_fill(nowhere, 0.0)
        final = final if in_type else final.to(form.dtype).clamp(min=torch.finfo(form.dtype).min)
    elif dropped is not None:
        nothing = None if checked else dropped.all(-1, keepdim=True)
        final = ~dropped if nothing is None else ~dropped | nothing
        even, nowhere = (nothing, None) if fill > -math.inf else (None, nothing)
    rows = (*sizes[:-1], 1)
    parts = ((final, sizes), (even, rows), (nowhere, rows))
    final, even, nowhere = (None if mask is None else _of_four_axes(mask, at, work) for mask, at in parts)
    return final, even, nowhere


def _of_four_axes(mask: Tensor, sizes: Sequence[Any], work: Sequence[Any]) -> Any:
    """A mask for scores [*work, rows, columns], as the kernel expects it for [N, H, rows, columns].

    The result has two to four axes.
    """
    if len(sizes) <= 2 or (len(sizes) <= 4 and len(work) == 2):
        return mask[None] if len(sizes) == 1 else mask
    if len(work) == 1:
        return mask.unsqueeze(1)
    whole = (*[1] * (len(work) + 2 - len(sizes)), *sizes)
    if all(size == 1 for size in whole[1:-2]):
        return mask.reshape(whole[0], 1, *whole[-2:])
    return mask.expand(whole[0], *work[1:], *whole[-2:]).reshape(whole[0], -1, *whole[-2:])
