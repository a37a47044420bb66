"""Defer attention scores and weights until something reads them, so that torch's fused kernel can replace them.

Inside ``with mode.forward():``, the product of two matrices may become a tensor without memory that records how to
compute it. Scale, masks, softmax, views and casts extend such tensors (``attention_forms`` interprets them),
and the product with the values becomes ``F.scaled_dot_product_attention`` of the script's inputs. Any other
operation computes what the script wrote, operator by operator, and continues with the result. So weights that
a script returns, keeps, prints or hooks equal those of the plain program, bit for bit. A dropout that draws
random numbers also ends the deferral.

A product that is not attention, or whose weights are read, is left alone from then on (``AttentionMode.step``).
Whether a mask is causal is determined once for each mask that stays constant from step to step, as a buffer
does. For other masks, nothing waits for their values.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode, enable_reentrant_dispatch
from torch.utils._pytree import tree_map_only

from flatout.kernels.attention_forms import (
    FORM_UPDATES,
    IN_PLACE_NAME,
    OUT_OF_PLACE,
    PRODUCTS,
    AttentionForm,
    AttentionMatch,
    Call,
    extend_form,
    is_active_dropout,
    match_attention,
    scores_form,
    unpack_operands,
)
from flatout.kernels.attention_runtime import (
    MASK_OPERATORS,
    PLAIN_TENSORS,
    MaskRegistry,
    RuntimeArguments,
    attend,
    autocast_state,
    empty_result,
    is_usable_later,
)

METADATA_ONLY = re.compile(
    "shape|dtype|device|ndim|layout|requires_grad|is_leaf|grad_fn|is_cuda|is_cpu|is_sparse|is_quantized|is_nested|"
    "is_meta|itemsize|size|dim|ndimension|numel|nelement|stride|is_floating_point|is_complex|element_size|"
    "is_contiguous|__len__|__hash__"
)
RESHAPES = {
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "flatten",
    "unflatten",
    "detach",
    "transpose",
    "permute",
}
VIEWS = RESHAPES | {"contiguous", "dropout"}
MAY_BE_VIEWS = VIEWS | {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
DEFERRABLE = RESHAPES | {"mean"}  # operators on weights that need no values yet
MAX_READ_STEPS = 3
FUSED_COUNT = [0]  # attentions computed by the fused kernel in this process


class DeferredOperation:
    """One operator call of the script with its arguments, and the value once something reads it.

    Deferred tensors among the arguments are represented by their operations. ``ordinal`` numbers the products
    of a forward pass.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        form: AttentionForm | None,
        mode: AttentionMode,
        ordinal: int,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.form, self.mode, self.ordinal = form, mode, ordinal
        self.value: Tensor | None = None
        self.owner: weakref.ref[DeferredScores] | None = None
        self.dependents: weakref.WeakSet[DeferredOperation] = weakref.WeakSet()
        self.producer = next((arg for arg in args if isinstance(arg, DeferredOperation)), None)
        self.tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        self.versions = [tensor._version for tensor in self.tensors]
        self.device: torch.device = self.tensors[0].device if self.producer is None else self.producer.device
        self.autocast = autocast_state(self.device)
        # The inputs that receive a gradient.
        self.leaves = {id(tensor): tensor for tensor in self.tensors if tensor.requires_grad}
        if self.producer is not None:
            self.leaves |= self.producer.leaves
            self.producer.dependents.add(self)

    @property
    def is_aliased(self) -> bool:
        """Whether this may be a view of another live tensor, or another tensor a view of this."""
        operation = self
        while operation.producer is not None and operation.function.__name__ in MAY_BE_VIEWS:
            operation = operation.producer
            if operation.owner is not None and operation.owner() is not None:
                return True
        return bool(self.dependents)

    def compute(self) -> Tensor:
        """The script's value, in the same place of the graph; computed once."""
        if self.value is None:
            self.mode.read_products.add(self.ordinal)
            self.value = self.rerun({})
        return self.value

    def rerun(self, replacements: dict[int, Tensor]) -> Tensor:
        """Run the script's operators from the start. ``replacements``: by id of the tensor."""
        self.check_versions()
        args, kwargs = tree_map_only(
            DeferredOperation,
            lambda operation: operation.rerun(replacements) if replacements else operation.compute(),
            (self.args, self.kwargs),
        )
        if replacements:
            args, kwargs = tree_map_only(
                Tensor, lambda tensor: replacements.get(id(tensor), tensor), (args, kwargs)
            )
        # Leaving inference mode also enables gradients, as before.
        with torch.inference_mode(False), torch.autocast(*self.autocast):
            value: Tensor = self.function(*args, **kwargs)
        return value

    def check_versions(self) -> None:
        """Raises RuntimeError if the values from which the script computed this no longer exist."""
        if [tensor._version for tensor in self.tensors] != self.versions:
            raise RuntimeError(
                "the script uses attention weights after changing one of their inputs in place, "
                "and the lever attention has not computed them: run without attention."
            )
        if self.producer is not None and self.value is None:
            self.producer.check_versions()


# -- deferred values


class _GraphPosition(torch.autograd.Function):
    """The place of a deferred tensor in the graph.

    It serves code that bypasses __torch_function__: a script's own autograd.Function, TorchScript, C++.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, cell: list[DeferredOperation], like: Tensor, *leaves: Tensor) -> Tensor:
        ctx.cell, ctx.leaves = cell, leaves
        return DeferredScores(cell, like)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> Any:
        with torch.enable_grad():
            replacements = {id(leaf): leaf.detach().requires_grad_() for leaf in ctx.leaves}
            value = ctx.cell[0].rerun(replacements)
            grads = torch.autograd.grad(value, list(replacements.values()), grad, allow_unused=True)
        return None, None, *grads


class _ReplaceValues(torch.autograd.Function):
    """Gives a deferred tensor that was changed in place the graph position of its values."""

    @staticmethod
    def forward(ctx: FunctionCtx, deferred: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(deferred)
        return deferred

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Any:
        return None, grad


class DeferredScores(torch.Tensor):
    """Scores or weights with a shape, a type and a place in the graph, but no values yet.

    ``cell[0]`` computes them. ``like`` has their shape, strides and type.
    """

    cell: list[DeferredOperation]

    @staticmethod
    def __new__(cls: type[DeferredScores], cell: list[DeferredOperation], like: Tensor) -> DeferredScores:
        result: DeferredScores = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=cell[0].device
        )
        result.cell = cell
        return result

    def __repr__(self, **_: object) -> str:
        return repr(self.cell[0].compute())

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if METADATA_ONLY.fullmatch(function.__self__.__name__ if name == "__get__" else name):
                return function(*args, **kwargs)
            result = _extend_deferred(function, name, args, kwargs)
        if result is not None:
            return result
        first = args[0] if args else None
        in_place = isinstance(first, DeferredScores) and IN_PLACE_NAME.fullmatch(name) is not None
        if in_place and isinstance(first, DeferredScores):
            for operation in list(first.cell[0].dependents):
                operation.compute()  # values from before the change must not see it
        args, kwargs = tree_map_only(
            DeferredScores, lambda deferred: deferred.cell[0].compute(), (tuple(args), kwargs)
        )
        result = function(*args, **kwargs)
        if not in_place:
            return result
        if args[0].requires_grad and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                _ReplaceValues.apply(first, args[0])
        return first if result is args[0] else result

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """For code that bypasses __torch_function__.

        This runs below autograd, where ``_GraphPosition`` represents this tensor.
        """

        def values(deferred: DeferredScores) -> Tensor:
            with enable_reentrant_dispatch():
                return deferred.cell[0].compute().detach()

        args, kwargs = tree_map_only(DeferredScores, values, (tuple(args), kwargs or {}))
        return function(*args, **kwargs)


def _deferred(operation: DeferredOperation, like: Tensor) -> DeferredScores:
    leaves = operation.leaves.values()
    result: DeferredScores = (
        _GraphPosition.apply([operation], like, *leaves) if leaves else DeferredScores([operation], like)
    )
    operation.owner = weakref.ref(result)
    return result


def _extend_deferred(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if name not in FORM_UPDATES and name not in PRODUCTS and name not in DEFERRABLE:
        return None
    args = unpack_operands(name, args)
    deferred_indices = [index for index, arg in enumerate(args) if isinstance(arg, DeferredScores)]
    if len(deferred_indices) != 1 or (name == "view" and any(isinstance(arg, torch.dtype) for arg in args)):
        return None
    index, first = deferred_indices[0], args[deferred_indices[0]]
    operation: DeferredOperation = first.cell[0]
    if operation.value is not None or not torch.is_grad_enabled():
        return None
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    others = [tensor for tensor in tensors if tensor is not first]
    if not all(
        type(tensor) in PLAIN_TENSORS if name in PRODUCTS else is_usable_later(tensor) for tensor in others
    ):
        return None
    mode, form = operation.mode, operation.form
    if is_active_dropout(Call(mode.reader, name, args, kwargs, index, None)):
        mode.has_dropout = True
        return None
    in_place = name in OUT_OF_PLACE
    function = getattr(torch.Tensor, OUT_OF_PLACE[name]) if in_place else function
    like = empty_result(function, operation.device, name in VIEWS, args, kwargs)
    if like is None or (in_place and (index != 0 or like.dtype is not first.dtype or operation.is_aliased)):
        return None
    call = Call(mode.reader, name, args, kwargs, index, like)
    if form is not None and name in PRODUCTS:
        match = match_attention(form, call)
        return None if match is None else mode.compute_attention(match, operation, like)
    extended = None if form is None else extend_form(form, call)
    if extended is None and not (name in DEFERRABLE and index == 0 and (form is None or form.is_weights)):
        return None
    args = (*args[:index], operation, *args[index + 1 :])
    successor = DeferredOperation(function, args, kwargs, extended, mode, operation.ordinal)
    if name == "detach":
        successor.leaves = {}
    if not in_place:
        return _deferred(successor, like)
    if successor.leaves != operation.leaves:  # this tensor's graph node has no path to the new leaves
        return None
    operation.owner, successor.owner = None, weakref.ref(first)
    first.cell[0] = successor
    return first


# -- the products of one module


class AttentionMode(TorchFunctionMode):
    """While entered, products may be deferred.

    Products of a module are identified by their order in a forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.masks = MaskRegistry()
        self.reader = RuntimeArguments(self.masks.numbers)
        self.fused: Counter[int] = Counter()
        self.has_dropout = self.calls_fused_kernel = (
            False  # the script drops weights, or calls the fused kernel
        )
        self.read_products: set[int] = set()  # products read since the last step
        self._read_steps: Counter[int] = Counter()
        self._excluded: set[int] = set()
        self.forward_passes = self._next_ordinal = self._max_products = 0

    @property
    def idle(self) -> bool:
        return 0 < self._max_products <= len(self._excluded)

    def step(self) -> None:
        """Called between two optimizer steps.

        Never between a forward pass and its backward pass, which may recompute it.
        """
        self._read_steps.update(self.read_products)
        self.read_products = set()
        self._excluded = {ordinal for ordinal, steps in self._read_steps.items() if steps >= MAX_READ_STEPS}
        self.masks.step()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap one forward pass of the module."""
        outer_ordinal, self._next_ordinal = self._next_ordinal, 0
        self.forward_passes += 1
        try:
            with self:
                yield
        finally:
            self._max_products = max(self._max_products, self._next_ordinal)
            self._next_ordinal = outer_ordinal

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        self.calls_fused_kernel |= function is torch._C._nn.scaled_dot_product_attention
        if name in PRODUCTS:
            result = self._product(function, name, args, kwargs)
            if result is not None:
                return result
        elif MASK_OPERATORS.fullmatch(name) and not any(
            isinstance(arg, Tensor) and (arg.requires_grad or isinstance(arg, DeferredScores)) for arg in args
        ):
            return self.masks.call_and_name(function, name, args, kwargs)
        elif function is torch.nn.functional.multi_head_attention_forward:
            with self:
                return _without_override_check(function)(*args, **kwargs)
        return function(*args, **kwargs)

    def _product(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        args = unpack_operands(name, args)
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        if any(isinstance(tensor, DeferredScores) for tensor in tensors):
            return None
        ordinal, self._next_ordinal = self._next_ordinal, self._next_ordinal + 1
        if (
            ordinal in self._excluded
            or not torch.is_grad_enabled()
            or not all(is_usable_later(tensor) and tensor.is_floating_point() for tensor in tensors)
            or torch._C._are_functorch_transforms_active()
            or len({tensor.device for tensor in tensors}) != 1
        ):
            return None
        form = scores_form(self.reader, name, args, kwargs)
        like = None if form is None else empty_result(function, tensors[0].device, False, args, kwargs)
        if form is None or like is None:
            return None
        form = replace(form, dtype=like.dtype)
        return _deferred(DeferredOperation(function, args, kwargs, form, self, ordinal), like)

    def compute_attention(self, match: AttentionMatch, operation: DeferredOperation, like: Tensor) -> Tensor:
        operation.check_versions()
        causal, no_empty_rows = self.masks.properties(match.form)
        with torch.autocast(*autocast_state(operation.device)[:2], enabled=False):
            out: Tensor = attend(self.reader, match, causal, no_empty_rows)
        self.fused[operation.ordinal] += 1
        FUSED_COUNT[0] += 1
        if out.stride() == like.stride():
            return out
        with_strides = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=out.device)
        return with_strides.copy_(out)


_unchecked_functions: dict[Any, Any] = {}


def _without_override_check(function: FunctionType) -> Any:
    """A Python function of torch without its has_torch_function check, so its operators are observed."""
    if function not in _unchecked_functions:
        names = {**function.__globals__, "has_torch_function": lambda *_: False}
        copied = type(function)(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        _unchecked_functions[function] = copied
    return _unchecked_functions[function]
