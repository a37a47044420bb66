"""Join a model's outputs for the shares of a batch: the script sees the whole batch's outputs on every rank.

Each rank then computes the same loss. A backward pass takes from its gradient the rows of the rank's own
share. The gradients of all ranks therefore add up to that of the whole batch, whatever the loss does with its
samples. This requires a model that treats its samples independently.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.shares import BatchShare, Rows, share
from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx


def join_outputs(torch: ModuleType, output: object, local_share: BatchShare, world: int) -> Any:
    """``output`` with the rows of all ranks in each tensor.

    Raises CannotParallelize for a value without rows per sample, such as a loss.
    """
    from torch.utils._pytree import tree_map_only

    def join_tensor(tensor: Tensor) -> Any:
        rows = Rows.of(list(tensor.shape), local_share)
        if rows is None and tensor.requires_grad:
            raise CannotParallelize(
                f"its model returns a tensor of shape {list(tensor.shape)} that has no row for each sample (its own loss?)"
            )
        return tensor if rows is None else _gather_rows(torch, tensor, rows, world)

    return tree_map_only(torch.Tensor, join_tensor, output)


def _gather_rows(torch: Any, tensor: Tensor, rows: Rows, world: int) -> Any:
    sizes = [share(rows.share.samples, rank, world).size * rows.per_sample for rank in range(world)]

    class GatherRows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, local: Tensor) -> Any:
            first = local.detach().movedim(rows.dim, 0).contiguous()
            padded = (
                torch.cat([first, first.new_zeros((max(sizes) - len(first), *first.shape[1:]))])
                if len(first) < max(sizes)
                else first
            )
            parts = [torch.empty_like(padded) for _ in sizes]
            torch.distributed.all_gather(parts, padded)
            whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
            return whole.movedim(0, rows.dim)

        @staticmethod
        def backward(ctx: FunctionCtx, gradient: Tensor) -> Any:
            return rows.own_rows(gradient)

    return GatherRows.apply(tensor)
