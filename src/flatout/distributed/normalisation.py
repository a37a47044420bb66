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


def synchronise_batchnorm(torch: ModuleType, root: Module, ledger: Ledger) -> int:
    """Make every batch normalisation of ``root`` that trains use the statistics of all ranks.

    Returns their number.
    """
    kind = torch.nn.modules.batchnorm._BatchNorm
    layers = [module for module in root.modules() if isinstance(module, kind)]
    for module in layers:
        ledger.set(module, "forward", _forward_of(torch, module, module.forward), new=True)
    return len(layers)


def _forward_of(torch: ModuleType, module: Module, original: Callable[..., Any]) -> Any:
    sum_ranks = _sum_of_ranks(torch)

    def forward(x: Tensor) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return original(x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        x32 = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = x32.new_tensor([x32.numel() / x32.shape[1]])
        sums = sum_ranks(torch.cat([x32.sum(dims), count]))
        n = sums[-1].detach()
        mean = sums[:-1] / n
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = x32 - mean.view(shape)
        variance = sum_ranks(centred.square().sum(dims)) / n
        _update_running_statistics(torch, module, mean.detach(), variance.detach() * n / (n - 1))
        normed = centred * torch.rsqrt(variance + module.eps).view(shape)
        if module.affine:
            normed = normed * module.weight.view(shape) + module.bias.view(shape)
        return normed.to(x.dtype)

    return forward


def _update_running_statistics(torch: ModuleType, module: Module, mean: Tensor, variance: Tensor) -> None:
    if not module.track_running_stats or module.running_mean is None:
        return
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        module.running_mean.mul_(1 - momentum).add_(mean.to(module.running_mean.dtype), alpha=momentum)
        module.running_var.mul_(1 - momentum).add_(variance.to(module.running_var.dtype), alpha=momentum)


def _sum_of_ranks(torch: Any) -> Any:
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
