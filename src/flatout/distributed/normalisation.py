"""Batch normalisation over the batch of all ranks, with sums that are exchanged in forward and backward.

torch's SyncBatchNorm supports only CUDA; this one runs on any device with torch's operators, and supports
uneven shares.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.nn import Module

    from flatout.schema.program import Ledger


def over_all_ranks(torch: ModuleType, root: Module, ledger: Ledger) -> int:
    """Make every batch normalisation of ``root`` that trains use the statistics of all ranks.

    Returns their number.
    """
    kind = torch.nn.modules.batchnorm._BatchNorm
    found = [module for module in root.modules() if isinstance(module, kind)]
    for module in found:
        ledger.set(module, "forward", _forward_of(torch, module, module.forward), new=True)
    return len(found)


def _forward_of(torch: ModuleType, module: Module, really: Callable[..., Any]) -> Any:
    total = _sum_of_ranks(torch)

    def forward(x: Tensor) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return really(x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = wide.new_tensor([wide.numel() / wide.shape[1]])
        sums = total(torch.cat([wide.sum(dims), count]))
        n = sums[-1].detach()
        mean = sums[:-1] / n
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = wide - mean.view(shape)
        variance = total(centred.square().sum(dims)) / n
        _note(torch, module, mean.detach(), variance.detach() * n / (n - 1))
        normed = centred * torch.rsqrt(variance + module.eps).view(shape)
        if module.affine:
            normed = normed * module.weight.view(shape) + module.bias.view(shape)
        return normed.to(x.dtype)

    return forward


def _note(torch: ModuleType, module: Module, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as torch does."""
    if not module.track_running_stats or module.running_mean is None:
        return
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        share = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        module.running_mean.mul_(1 - share).add_(mean.to(module.running_mean.dtype), alpha=share)
        module.running_var.mul_(1 - share).add_(variance.to(module.running_var.dtype), alpha=share)


def _sum_of_ranks(torch: Any) -> Any:
    """The sum over all ranks; its gradient is the sum of their gradients."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Any:
            x = x.clone()
            torch.distributed.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx: FunctionCtx, gradient: Tensor) -> Any:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient)
            return gradient

    return Sum.apply
