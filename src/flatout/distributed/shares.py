"""Split a batch between the ranks.

Each rank takes consecutive samples; the first ranks take one more if the split is uneven. Every rank draws
the batches of the whole program in the plain run's order and fetches only its own samples. If a batch has
fewer samples than ranks, every rank computes all of it. It then counts on rank 0 alone, so that no rank is
without a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class BatchShare:
    """Samples ``start`` to ``stop`` of a batch of ``samples``.

    ``weight``: its part of a mean over the batch; the weights of all ranks add up to 1.
    """

    samples: int
    start: int
    stop: int
    weight: float

    @property
    def size(self) -> int:
        return self.stop - self.start


def share(samples: int, rank: int, world: int) -> BatchShare:
    """The share of a batch for ``rank`` of ``world``."""
    if samples < world:
        return BatchShare(samples, 0, samples, 1.0 if rank == 0 else 0.0)
    base, remainder = divmod(samples, world)
    start = rank * base + min(rank, remainder)
    stop = start + base + (rank < remainder)
    return BatchShare(samples, start, stop, (stop - start) / samples)


@dataclass(frozen=True)
class Rows:
    """The location of a share's samples in a shape: ``per_sample`` entries per sample along ``dim``."""

    dim: int
    per_sample: int
    share: BatchShare

    @classmethod
    def of(cls, shape: Sequence[int], share: BatchShare) -> Rows | None:
        """The first dimension if its size matches, else the only one that matches.

        Otherwise the first one, if samples were flattened into it (heads, tokens).
        """
        # The rule of agent/batches.batch_dimension plus one case; the package distributed may not import agent.
        dims = [dim for dim, size in enumerate(shape) if size == share.size]
        if dims and (dims[0] == 0 or len(dims) == 1):
            return cls(dims[0], 1, share)
        if not dims and shape and share.size > 1 and shape[0] and shape[0] % share.size == 0:
            return cls(0, shape[0] // share.size, share)
        return None

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        return [
            self.share.samples * self.per_sample if dim == self.dim else size
            for dim, size in enumerate(shape)
        ]

    def own_rows(self, tensor: Tensor) -> Any:
        return tensor.narrow(self.dim, self.share.start * self.per_sample, self.share.size * self.per_sample)


class SplitBatches:
    """Replaces the sampler of a DataLoader's iterator."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> SplitIterator:
        return SplitIterator(iter(self.batches), self.rank, self.world)


class SplitIterator:
    """``shares``: the shares of batches that were drawn and not yet consumed.

    Workers prefetch and deliver in order.
    """

    def __init__(self, batches: Iterator[Any], rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world
        self.shares: deque[BatchShare] = deque()

    def __iter__(self) -> SplitIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self.batches)
        part = share(len(batch), self.rank, self.world)
        self.shares.append(part)
        return batch[part.start : part.stop]


# Join a model's outputs for the shares of a batch: the script sees the whole batch's outputs on every rank.
#
# Each rank then computes the same loss. A backward pass takes from its gradient the rows of the rank's own
# share. The gradients of all ranks therefore add up to that of the whole batch, whatever the loss does with its
# samples. This requires a model that treats its samples independently.


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
