"""Measure how a program amplifies rounding: run the plain program, deliberately rounded to fewer bits.

A kernel that sums in another order, or multiplies in half precision, rounds in every step, and so does this
module. Every forward pass rounds the weights and the outputs of all layers with a matrix, and every backward
pass rounds the gradients of these outputs. Losses that a layer returns are not rounded, nor are the weights
between steps.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.guard.captured_steps import perturb_weights
from flatout.guard.copies import mapped_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.schema.program import Ledger, TrainingContext


def perturb(context: TrainingContext, share: float, ledger: Ledger) -> None:
    """Round by at most ``share`` of each number (`flatout.guard.verdict.perturbation_for`).

    2^-9 keeps the 8 bits of bfloat16. If no layer is known or called (torch.compile in the script bypasses
    our hooks), every weight is moved once by up to this share instead.
    """
    layers = [
        module
        for root in context.roots
        for module in root.modules()
        if any(map(_is_matrix, module.parameters(recurse=False)))
    ]
    if not layers:
        perturb_weights(context.parameters, share, context.torch)
        return
    layers_rounded = [_RoundedLayer(module, round(-math.log2(share)) - 1, context.torch) for module in layers]
    for rounded in layers_rounded:
        ledger.on_restore("forward pre-hook", rounded.module.register_forward_pre_hook(rounded.begin).remove)
        ledger.on_restore(
            "forward hook", rounded.module.register_forward_hook(rounded.end, always_call=True).remove
        )

    def after_step(optimizer: Optimizer, *_: object) -> None:
        while handles:
            handles.pop().remove()
        if not any(rounded.called for rounded in layers_rounded):
            perturb_weights(context.parameters, share, context.torch)

    handles = [optimizer.register_step_post_hook(after_step) for optimizer in context.optimizers]


class _RoundedLayer:
    """Rounds one layer.

    It replaces the data of the weights, so autograd and optimizers see no other tensor.
    """

    def __init__(self, module: Module, bits: int, torch: ModuleType) -> None:
        self.module, self.bits, self.torch = module, bits, torch
        self.originals: list[tuple[Any, Any]] = []
        self.called = False

    def begin(self, module: Module, args: object) -> None:
        self.called = True
        self.originals = [(p, p.data) for p in self.module.parameters(recurse=False) if _is_matrix(p)]
        for p, data in self.originals:
            p.data = self._round(data)

    def end(self, module: Module, args: object, output: object) -> Any:
        for p, data in self.originals:
            p.data = data
        self.originals = []
        return mapped_tensors(output, self._rounded_output)

    def _rounded_output(self, x: Tensor) -> Any:
        if not x.dim() or x.dtype not in (self.torch.float32, self.torch.float64):
            return x
        exact = x.detach()
        x = x + (self._round(exact) - exact).where(exact.isfinite(), 0.0)
        if x.requires_grad:
            x.register_hook(self._round)
        return x

    def _round(self, x: Tensor) -> Any:
        """Round to this many significant bits. Infinities and NaN stay as they are."""
        mantissa, exponent = self.torch.frexp(x)
        return self.torch.ldexp((mantissa * 2.0**self.bits).round() / 2.0**self.bits, exponent).where(
            x.isfinite(), x
        )


def _is_matrix(p: Tensor) -> bool:
    return bool(p.dim() >= 2 and p.is_floating_point() and p.element_size() >= 4)
