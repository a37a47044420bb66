"""Split an evaluation between the ranks on request: each computes its share, and the script sees all outputs.

Every rank has fetched the whole batch. The first batch of a module is computed both ways to test whether its
outputs can be joined. If they differ by more than rounding, or contain a value without a row per sample (a
loss), its evaluations stay whole on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.gathering import put_together
from flatout.distributed.shares import Rows, share

if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module

    from flatout.job.rank_environment import RankEnvironment
    from flatout.schema.program import TrainingContext

NAME = "data_parallel"
STAYS_WHOLE = (
    "its evaluations stay whole on every rank: the model's outputs for parts of a batch cannot be joined"
)
ROUNDING = 1e-3  # relative to a tensor's largest number; dependence between samples exceeds it, half precision does not


class Evaluating:
    def __init__(self, torch: ModuleType, context: TrainingContext, here: RankEnvironment) -> None:
        self.torch, self.context, self.here = torch, context, here
        self._divides: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __call__(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of ``forward``; the other ranks are at the same point with the same arguments."""
        samples = next(
            (
                each.shape[0]
                for each in (*args, *kwargs.values())
                if isinstance(each, self.torch.Tensor) and each.dim()
            ),
            0,
        )
        if module.training or samples < self.here.world_size or self._divides.get(module) is False:
            return forward(*args, **kwargs)
        if module in self._divides:
            return self._gathered(self._own(forward, args, kwargs, samples), samples)
        whole = forward(*args, **kwargs)
        self._divides[module] = found = self._tried(module, forward, args, kwargs, samples, whole)
        if not found:
            self.context.report(NAME, STAYS_WHOLE)
        return whole

    def _own(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], samples: int
    ) -> Any:
        part = share(samples, self.here.rank, self.here.world_size)
        mine = [
            self.context.rows_of(each, samples, part.start, part.stop) for each in (*args, *kwargs.values())
        ]
        return forward(*mine[: len(args)], **dict(zip(kwargs, mine[len(args) :], strict=True)))

    def _gathered(self, mine: Any, samples: int) -> Any:
        return put_together(
            self.torch, mine, share(samples, self.here.rank, self.here.world_size), self.here.world_size
        )

    def _tried(
        self,
        module: Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        samples: int,
        whole: Any,
    ) -> bool:
        """A joint decision: no rank enters a collective if one of them cannot."""
        from torch.utils._pytree import tree_leaves

        part = share(samples, self.here.rank, self.here.world_size)
        with self.torch.random.fork_rng(
            devices=range(self.torch.cuda.device_count()) if self.torch.cuda.is_initialized() else ()
        ):
            try:
                mine = self._own(forward, args, kwargs, samples)
                leaves = [leaf for leaf in tree_leaves(mine) if isinstance(leaf, self.torch.Tensor)]
                can = bool(leaves) and all(Rows.of(list(leaf.shape), part) is not None for leaf in leaves)
            except Exception:  # a shape fixed in the model; the whole batch has just worked
                mine, can = None, False
        device = next(module.parameters()).device
        if not self._all(can, device):
            return False
        found = self._gathered(mine, samples)
        pairs = list(zip(tree_leaves(found), tree_leaves(whole), strict=False))
        return self._all(
            len(tree_leaves(found)) == len(tree_leaves(whole)) and all(self._alike(a, b) for a, b in pairs),
            device,
        )

    def _alike(self, a: object, b: object) -> bool:
        if not isinstance(a, self.torch.Tensor):
            return type(a) is type(b)
        if not isinstance(b, self.torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return bool(self.torch.equal(a, b))
        largest = float(b.abs().max()) if b.numel() else 0.0
        return bool(self.torch.allclose(a, b, rtol=0.0, atol=ROUNDING * largest, equal_nan=True))

    def _all(self, here: bool, device: Device) -> bool:
        """Whether it is true on all ranks. Only NCCL needs the flag on the model's device."""
        flag = self.torch.tensor(
            [float(here)], device=device if "nccl" in str(self.torch.distributed.get_backend()) else "cpu"
        )
        self.torch.distributed.all_reduce(flag)
        return float(flag) == self.here.world_size
