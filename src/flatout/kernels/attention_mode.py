"""Watches the operators of a running program and defers attention scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flatout.kernels.attend import attend
from flatout.kernels.attention_deferred import (
    DeferredScores,
    RuntimeArguments,
    deferred_tensor,
    settled,
    shaped_like,
)
from flatout.kernels.attention_forms import MAKES_MASKS
from flatout.kernels.attention_masks import MaskRegistry
from flatout.kernels.attention_operation import DeferredOperation, autocast_state
from flatout.kernels.attention_products import PRODUCTS, product, with_operands
from flatout.kernels.attention_reading import AttentionMatch

PATIENCE_STEPS = 3
COUNT = [0]  # attentions computed by the fused kernel in this process


class AttentionMode(TorchFunctionMode):
    """While entered, products may be deferred.

    Products of a module are identified by their order in a forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.masks = MaskRegistry()
        self.see = RuntimeArguments(self.masks.numbers)
        self.fused: Counter[int] = Counter()
        self.drops = self.calls = False  # the script drops weights, or calls the fused kernel
        self.looked: set[int] = set()  # products read since the last step
        self._looks: Counter[int] = Counter()
        self._alone: set[int] = set()
        self.passes = self._next = self._most = 0

    @property
    def idle(self) -> bool:
        return 0 < self._most <= len(self._alone)

    def step(self) -> None:
        """Called between two optimizer steps.

        Never between a forward pass and its backward pass, which may recompute it.
        """
        self._looks.update(self.looked)
        self.looked = set()
        self._alone = {ordinal for ordinal, steps in self._looks.items() if steps >= PATIENCE_STEPS}
        self.masks.step()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap one forward pass of the module."""
        before, self._next = self._next, 0
        self.passes += 1
        try:
            with self:
                yield
        finally:
            self._most, self._next = max(self._most, self._next), before

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        self.calls |= function is torch.nn.functional.scaled_dot_product_attention
        if name in PRODUCTS:
            made = self._product(function, name, args, kwargs)
            if made is not None:
                return made
        elif name in MAKES_MASKS and not any(
            isinstance(each, Tensor) and (each.requires_grad or isinstance(each, DeferredScores))
            for each in args
        ):
            return self.masks.follow(function, name, args, kwargs)
        elif function is torch.nn.functional.multi_head_attention_forward:
            with self:
                return _unasked(function)(*args, **kwargs)
        return function(*args, **kwargs)

    def _product(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        args = with_operands(name, args)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if any(isinstance(each, DeferredScores) for each in tensors):
            return None
        ordinal, self._next = self._next, self._next + 1
        if (
            ordinal in self._alone
            or not torch.is_grad_enabled()
            or not all(map(settled, tensors))
            or not all(each.is_floating_point() for each in tensors)
            or torch._C._are_functorch_transforms_active()
            or len({each.device for each in tensors}) != 1
        ):
            return None
        form = product(self.see, name, args, kwargs)
        like = None if form is None else shaped_like(function, tensors[0].device, False, args, kwargs)
        if form is None or like is None:
            return None
        return deferred_tensor(
            DeferredOperation(function, args, kwargs, replace(form, dtype=like.dtype), self, ordinal),
            like,
            tensors[0].device,
        )

    def attended(self, whole: AttentionMatch, step: DeferredOperation, like: Tensor) -> Tensor:
        step.check()
        causal, checked = self.masks.known(whole.form)
        device, dtype, _ = autocast_state(step.device)
        with torch.autocast(device, dtype, enabled=False):
            found: Tensor = attend(self.see, whole, causal, checked)
        self.fused[step.ordinal] += 1
        COUNT[0] += 1
        if found.stride() == like.stride():
            return found
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=found.device).copy_(
            found
        )


_unasked_functions: dict[Any, Any] = {}


def _unasked(function: FunctionType) -> Any:
    """A Python function of torch without its has_torch_function check.

    Its own operators can then be observed.
    """
    if function not in _unasked_functions:
        known = {**function.__globals__, "has_torch_function": lambda *_: False}
        own = type(function)(
            function.__code__, known, function.__name__, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        _unasked_functions[function] = own
    return _unasked_functions[function]
