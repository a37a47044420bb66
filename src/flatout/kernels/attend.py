"""Calculate a recognised attention with torch's fused kernel.

Fully masked rows keep their result. If the masked scores are minus infinity, softmax gives NaN, and so does
this. If they are a large negative number that absorbs the scores, all columns weigh the same: such a row gets
a query of zeros. The kernel sees neither case: the added mask is shifted row by row, which softmax ignores,
and rows that keep nothing keep everything.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.attention_forms import (
    ABSORBING_VALUES,
    MASKED_SCORE,
    ArgumentReader,
    AttentionForm,
    AttentionMatch,
    broadcast,
    same_sizes,
)


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
