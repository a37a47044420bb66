"""How the gradients of a bucket become their mean over all ranks: one of torch's communication hooks.

The same hooks serve flatout's own buckets (exchange.py) and a script's DistributedDataParallel:

    plain       allreduce_hook: every byte
    bf16        bf16_compress_hook: half the bytes; the exponent of float32, three digits
    fp16        fp16_compress_hook: half the bytes; four digits, from 6e-8 to 65,504
    powersgd    powerSGD_hook: two thin matrices in place of a matrix; the rest is added to the next gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

WARM_UP_PASSES = 100  # uncompressed passes before PowerSGD; the published code has none, torch's hook 1,000
POWERSGD_RANK = 2
NO_NUMPY = "torch's PowerSGD draws its first matrices with NumPy, which is not installed"
CommHook = tuple[Any, Callable[[Any, Any], Any]]  # the state and the function that `register_comm_hook` takes


@dataclass(frozen=True)
class Transport:
    """``kind`` is a name of the table above; ``rank`` and ``after`` belong to PowerSGD.

    ``bucket_bytes``: None for one bucket of each dtype.
    """

    kind: str = "plain"
    rank: int = POWERSGD_RANK
    after: int = WARM_UP_PASSES
    bucket_bytes: int | None = 25 * 2**20  # the default of torch's DistributedDataParallel

    @classmethod
    def read(cls, value: Any) -> Transport:
        """Read a value that the lever ``comm_compression`` accepts."""
        return cls(**(dict(value) if isinstance(value, Mapping) else {"kind": value}))

    def hook(self, group: object = None) -> CommHook:
        """A hook with a state of its own, for a group of ranks (None: all).

        Raises LookupError for PowerSGD without NumPy.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.kind != "powersgd":
            return group, getattr(default_hooks, HOOKS[self.kind])
        if find_spec("numpy") is None:
            raise LookupError(NO_NUMPY)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=self.rank, start_powerSGD_iter=self.after
        )
        # torch rejects the annotation of a bucket
        return state, lambda state, bucket: powersgd_blocking(state, bucket)

    def register(self, torch: ModuleType, ddp: DistributedDataParallel) -> None:
        """Register the hook with a script's module, for the rest of its life: torch cannot remove one."""
        group = ddp.process_group if ddp.process_group is not torch.distributed.group.WORLD else None
        ddp.register_comm_hook(*self.hook(group))
        ddp._comm_hooks.pop()  # a pickled module must not contain flatout's hook


def powersgd_blocking(state: Any, bucket: Any) -> Any:
    """torch's PowerSGD, which starts its second collective on a thread of the backend.

    With several buckets under way, gloo would start them in another order on each rank, and wait forever.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


HOOKS = {"plain": "allreduce_hook", "bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}


def compressible(torch: ModuleType, tensor: Tensor) -> bool:
    """Whether compression saves anything and keeps the sign and an imaginary part."""
    return tensor.dtype in (torch.float32, torch.float64)
