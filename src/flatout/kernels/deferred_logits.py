"""Defer logits until something reads them, so that an unmodified model computes its loss without them.

``linear(x, weight, bias)`` returns a tensor without memory that records how to compute it. Views of its
leading axes, slices, copies and casts are such tensors again. ``F.cross_entropy`` of one becomes
``linear_cross_entropy`` of x, weight and bias. Any other operation computes the logits, once, and continues
with them: an argmax for the accuracy, a print, an in-place operation, a gradient from another source. So the
program sees the same values as without deferral.

Two cases need care. The program may read logits after the optimizer has changed the weight: ``before_step``
keeps a copy of the weight for live logits that were never computed. And a hook on the logits must see their
gradient, so logits with a hook take no shortcut.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flatout.kernels.chunked_loss import REDUCTIONS, linear_cross_entropy

aten = torch.ops.aten
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.detach.default,
    aten.slice.Tensor,
    aten.select.int,
}
COPIES = {aten.clone.default, aten._to_copy.default}
_live_sources: weakref.WeakSet[LogitsSource] = weakref.WeakSet()


class LogitsSource:
    """The source of the values of deferred tensors: a linear layer, or a copy of another deferred tensor."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        copied_from: tuple[DeferredLogits, Any] | None = None,
    ) -> None:
        self.x, self.weight, self.bias, self.copied_from = x, weight, bias, copied_from
        self.versions = self._versions()
        self.saved_weights: tuple[Tensor, Tensor | None] | None = None
        self.values: Tensor | None = None
        self.has_gradient_hook = False
        self.copies: weakref.WeakSet[LogitsSource] = weakref.WeakSet()
        _live_sources.add(self)

    def _versions(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in (self.x, self.weight, self.bias) if tensor is not None)

    @property
    def weights_unchanged(self) -> bool:
        return self.saved_weights is None and self._versions() == self.versions

    @property
    def is_unread(self) -> bool:
        """Whether nothing has read these values or their source, and nothing waits for their gradient."""
        return (
            self.values is None
            and not self.has_gradient_hook
            and (self.copied_from is None or self.copied_from[0].origin.is_unread)
        )

    def compute(self) -> Tensor:
        """The values, without a gradient: the same product as the layer's."""
        if self.values is not None:
            return self.values
        if self.copied_from is not None:
            source, change = self.copied_from
            self.values = change(source.compute())
            self.copied_from = None
            return self._release_inputs()
        if self.saved_weights is None and not self.weights_unchanged:
            raise RuntimeError(
                "the program reads these logits after changing their weights outside an optimizer, "
                "and fused_ops has not computed them: run without fused_ops."
            )
        weight, bias = self.saved_weights or (self.weight, self.bias)
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            self.values = F.linear(self.x.detach(), weight.detach(), None if bias is None else bias.detach())
        return self._release_inputs()

    def _release_inputs(self) -> Tensor:
        assert self.values is not None
        self.saved_weights, self.x, self.weight, self.bias = None, self.x.detach(), self.weight.detach(), None
        return self.values


class DeferredLogits(torch.Tensor):
    """A tensor [..., V] with a shape, a type and a place in the graph, but no values yet."""

    origin: LogitsSource
    views: tuple[
        tuple[Any, tuple[Any, ...], dict[str, Any]], ...
    ]  # views from the origin's values to this tensor

    @staticmethod
    def __new__(cls: type[DeferredLogits], origin: LogitsSource, views: Any, like: Tensor) -> DeferredLogits:
        """``like`` has no memory either: a meta tensor with the shape, strides and type."""
        result: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=origin.x.device
        )
        result.origin, result.views = origin, views
        return result

    def compute(self) -> Tensor:
        values = self.origin.compute()
        for function, args, kwargs in self.views:
            values = function(values, *args, **kwargs)
        return values

    def __repr__(self, **_: object) -> str:
        return repr(materialized(self))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            loss = _loss_without_logits(*args, **kwargs)
            if loss is not None:
                return loss
        elif function in GRADIENT_HOOKS:
            args[0].origin.has_gradient_hook = True
        elif function in NEEDS_MEMORY:
            args = tuple(materialized(arg) for arg in args)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits):
            result = _extend_deferred(function, first, args[1:], kwargs)
            if result is not None:
                return result
        is_mutable = function._schema.is_mutable
        if is_mutable and isinstance(first, DeferredLogits):
            for copy in list(first.origin.copies):
                copy.compute()  # copies from before the change must not see it
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.compute, (tuple(args), kwargs))
        result = function(*args, **kwargs)
        returns_first = is_mutable and isinstance(first, DeferredLogits) and isinstance(result, Tensor)
        return first if returns_first else result


NEEDS_MEMORY = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.storage,
    torch.Tensor.untyped_storage,
    torch.Tensor.__array__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__format__,
    torch.Tensor.share_memory_,
    torch.Tensor.pin_memory,
    torch.Tensor.data.__get__,
}
GRADIENT_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}


class _Linear(torch.autograd.Function):
    """The node of the layer in the graph, for gradients that reach the logits other than through the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, origin: LogitsSource) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return DeferredLogits(origin, (), x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None, None


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, deferred: Tensor) -> Tensor:
        assert isinstance(deferred, DeferredLogits)
        return deferred.compute().clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) with deferred values.

    x [..., D]; all ordinary tensors. Under autocast, the product uses autocast's type.
    """
    if torch._C._are_functorch_transforms_active():  # functorch transforms unwrap tensors
        return F.linear(x, weight, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(lower), weight.to(lower), None if bias is None else bias.to(lower)
    result: Tensor = _Linear.apply(x, weight, bias, LogitsSource(x, weight, bias))
    return result


def materialized(deferred: Any) -> Any:
    """An ordinary tensor with the same values, in the same place of the graph. Anything else is returned."""
    if not isinstance(deferred, DeferredLogits):
        return deferred
    if torch.is_grad_enabled() and deferred.requires_grad:
        return _Values.apply(deferred)
    return deferred.compute()


def before_step() -> None:
    """Keep the weights, which are about to change, for live logits that may still be read.

    One copy per weight. Logits that are alive at a second step are being collected. So they are computed, and
    their weight is released.
    """
    saved_weights: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
    for origin in list(_live_sources):
        if origin.values is not None:
            _live_sources.discard(origin)
        elif origin.saved_weights is not None:
            origin.compute()
        elif origin.copied_from is None and origin.weights_unchanged:
            key, bias = (id(origin.weight), id(origin.bias)), origin.bias
            if key not in saved_weights:
                saved_weights[key] = (
                    origin.weight.detach().clone(),
                    None if bias is None else bias.detach().clone(),
                )
            origin.saved_weights = saved_weights[key]


def _extend_deferred(
    function: Callable[..., Any], deferred: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DeferredLogits | None:
    if function not in VIEWS and function not in COPIES:
        return None
    if (
        function is aten._to_copy.default
        and torch.device(kwargs.get("device") or deferred.device) != deferred.device
    ):
        return None
    like = torch.empty_strided(deferred.shape, deferred.stride(), dtype=deferred.dtype, device="meta")
    if function in COPIES:
        # A copy of computed values is an ordinary copy.
        if not deferred.origin.is_unread:
            return None
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        source = deferred.origin
        origin = LogitsSource(
            source.x, source.weight, source.bias, (deferred, lambda values: function(values, *args, **kwargs))
        )
        source.copies.add(origin)
        return DeferredLogits(origin, (), function(like, *args, **kwargs))
    result = function(like, *args, **kwargs)
    axes, axis = deferred.dim(), args[0] if args else 0
    cuts_last_axis = function in (aten.slice.Tensor, aten.select.int) and axis % axes == axes - 1
    if cuts_last_axis or result.dim() == 0 or result.shape[-1] != deferred.shape[-1]:
        return None
    return DeferredLogits(deferred.origin, (*deferred.views, (function, args, kwargs)), result)


def _rows(deferred: DeferredLogits) -> Tensor:
    """x at the rows of this tensor, attached to the graph: the same views on [..., D] instead of [..., V]."""
    copied_from = deferred.origin.copied_from
    rows = deferred.origin.x if copied_from is None else _rows(copied_from[0])
    width = rows.shape[-1]
    for function, args, kwargs in deferred.views:
        if function in (aten.slice.Tensor, aten.select.int):
            rows = function(rows, *args, **kwargs)
        elif function in (aten.view.default, aten._unsafe_view.default):
            rows = rows.reshape(*args[0][:-1], width)
    return rows


def _loss_without_logits(
    input: object = None,
    target: Tensor = None,
    weight: Tensor = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """F.cross_entropy without the logits if possible, otherwise None.

    Takes the parameters of F.cross_entropy.
    """
    if (
        not isinstance(input, DeferredLogits)
        or not (torch.is_grad_enabled() and input.requires_grad)
        or isinstance(target, DeferredLogits)
    ):
        return None
    origin, device = input.origin, input.device.type
    if (
        not (weight is size_average is reduce is None)
        or reduction not in REDUCTIONS
        or input.dim() != 2
        or target.dtype is not torch.int64
        or target.shape != input.shape[:1]
        or not origin.is_unread
        or not origin.weights_unchanged
    ):
        return None
    in_float32 = torch.is_autocast_enabled(device) and input.dtype is not torch.float64
    dtype = torch.float32 if in_float32 else input.dtype
    with torch.autocast(device, enabled=False):
        loss = linear_cross_entropy(
            _rows(input), origin.weight, target, origin.bias, ignore_index, reduction, label_smoothing
        )
    FUSED_LOSSES[0] += 1
    return loss.to(dtype)


FUSED_LOSSES = [0]  # losses computed without logits in this process
