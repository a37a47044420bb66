"""An evaluation divided between the ranks, where that is asked for: each computes its share of a batch, and the script sees the outputs of all of it.

Every rank has fetched the whole batch. Whether a module's outputs may be put together is tried at its first batch, which is computed both ways: where they
differ by more than rounding, or hold something without a row for each sample (a loss), its evaluations stay whole on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from flatout.ranks.gathering import put_together
from flatout.ranks.shares import Rows, share

NAME = "data_parallel"
STAYS_WHOLE = "its evaluations stay whole on every rank: what the model gives for parts of a batch cannot be put together"
ROUNDING = 1e-3  # relative to the largest number of a tensor; what looks from sample to sample is off by more, half precision by less


class Evaluating:
    def __init__(self, torch: Any, scene: Any, here: Any) -> None:
        self.torch, self.scene, self.here = torch, scene, here
        self._divides: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __call__(self, module: Any, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """What ``forward`` gives; the other ranks are at the same place with the same arguments."""
        samples = next((each.shape[0] for each in (*args, *kwargs.values()) if isinstance(each, self.torch.Tensor) and each.dim()), 0)
        if module.training or samples < self.here.world_size or self._divides.get(module) is False:
            return forward(*args, **kwargs)
        if module in self._divides:
            return self._gathered(self._own(forward, args, kwargs, samples), samples)
        whole = forward(*args, **kwargs)
        self._divides[module] = found = self._tried(module, forward, args, kwargs, samples, whole)
        if not found:
            self.scene.report(NAME, STAYS_WHOLE)
        return whole

    def _own(self, forward: Callable, args: tuple, kwargs: dict, samples: int) -> Any:
        part = share(samples, self.here.rank, self.here.world_size)
        mine = [self.scene.rows_of(each, samples, part.start, part.stop) for each in (*args, *kwargs.values())]
        return forward(*mine[:len(args)], **dict(zip(kwargs, mine[len(args):], strict=True)))

    def _gathered(self, mine: Any, samples: int) -> Any:
        return put_together(self.torch, mine, share(samples, self.here.rank, self.here.world_size), self.here.world_size)

    def _tried(self, module: Any, forward: Callable, args: tuple, kwargs: dict, samples: int, whole: Any) -> bool:
        """Decided alike by all ranks: none goes to meet the others where one of them cannot."""
        from torch.utils._pytree import tree_leaves

        part = share(samples, self.here.rank, self.here.world_size)
        with self.torch.random.fork_rng(devices=range(self.torch.cuda.device_count()) if self.torch.cuda.is_initialized() else ()):
            try:
                mine = self._own(forward, args, kwargs, samples)
                leaves = [leaf for leaf in tree_leaves(mine) if isinstance(leaf, self.torch.Tensor)]
                can = bool(leaves) and all(Rows.of(list(leaf.shape), part) is not None for leaf in leaves)
            except Exception:  # a shape that is written into the model: the whole batch has just gone through
                mine, can = None, False
        device = next(module.parameters()).device
        if not self._all(can, device):
            return False
        found = self._gathered(mine, samples)
        pairs = list(zip(tree_leaves(found), tree_leaves(whole), strict=False))
        return self._all(len(tree_leaves(found)) == len(tree_leaves(whole)) and all(self._alike(a, b) for a, b in pairs), device)

    def _alike(self, a: Any, b: Any) -> bool:
        if not isinstance(a, self.torch.Tensor):
            return type(a) is type(b)
        if not isinstance(b, self.torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return bool(self.torch.equal(a, b))
        largest = float(b.abs().max()) if b.numel() else 0.0
        return bool(self.torch.allclose(a, b, rtol=0.0, atol=ROUNDING * largest, equal_nan=True))

    def _all(self, here: bool, device: Any) -> bool:
        """Whether all ranks say so. Only NCCL wants the flag on the device of the model."""
        flag = self.torch.tensor([float(here)], device=device if "nccl" in str(self.torch.distributed.get_backend()) else "cpu")
        self.torch.distributed.all_reduce(flag)
        return float(flag) == self.here.world_size
