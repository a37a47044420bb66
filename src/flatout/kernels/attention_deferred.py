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

from flatout.kernels.attend import attend
from flatout.kernels.attention_arguments import (
    PLAIN,
    RuntimeArguments,
    autocast_state,
    settled,
    shaped_like,
)
from flatout.kernels.attention_forms import (
    CHANGES,
    OUT_OF_PLACE,
    PRODUCTS,
    AttentionForm,
    AttentionMatch,
    Call,
    drops,
    extended,
    finished,
    product,
    with_operands,
)
from flatout.kernels.attention_masks import MAKES_MASKS, MaskRegistry

LOOKS_ONLY = re.compile(
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
LATER = RESHAPES | {"mean"}  # operators on weights that need no values yet
CHANGES_IT = re.compile(
    r"(?!__)\w+_|__(set|setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
)
PATIENCE_STEPS = 3
COUNT = [0]  # attentions computed by the fused kernel in this process


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
        self.later: weakref.WeakSet[DeferredOperation] = weakref.WeakSet()
        self.before = next((thing for thing in args if isinstance(thing, DeferredOperation)), None)
        self.tensors = [thing for thing in (*args, *kwargs.values()) if isinstance(thing, Tensor)]
        self.versions = [tensor._version for tensor in self.tensors]
        self.device: torch.device = self.tensors[0].device if self.before is None else self.before.device
        self.autocast = autocast_state(self.device)
        # The inputs that receive a gradient.
        self.leaves = {id(tensor): tensor for tensor in self.tensors if tensor.requires_grad}
        if self.before is not None:
            self.leaves |= self.before.leaves
            self.before.later.add(self)

    @property
    def is_seen_elsewhere(self) -> bool:
        """Whether this may be a view of another live tensor, or another tensor a view of this."""
        operation = self
        while operation.before is not None and operation.function.__name__ in MAY_BE_VIEWS:
            operation = operation.before
            if operation.owner is not None and operation.owner() is not None:
                return True
        return bool(self.later)

    def compute(self) -> Tensor:
        """The value that the script would have had here, in the same place of the graph.

        It is kept once computed.
        """
        if self.value is None:
            self.mode.looked.add(self.ordinal)
            self.value = self.made({})
        return self.value

    def made(self, instead: dict[int, Tensor]) -> Tensor:
        """Run the operators of the script from the start.

        ``instead`` maps ids of tensors to their replacements.
        """
        self.check()
        args, kwargs = tree_map_only(
            DeferredOperation,
            lambda operation: operation.made(instead) if instead else operation.compute(),
            (self.args, self.kwargs),
        )
        if instead:
            args, kwargs = tree_map_only(
                Tensor, lambda tensor: instead.get(id(tensor), tensor), (args, kwargs)
            )
        # Leaving inference mode also enables gradients, as before.
        with torch.inference_mode(False), torch.autocast(*self.autocast):
            value: Tensor = self.function(*args, **kwargs)
        return value

    def check(self) -> None:
        """Raises RuntimeError if the values from which the script computed this no longer exist."""
        if [tensor._version for tensor in self.tensors] != self.versions:
            raise RuntimeError(
                "the script uses attention weights after changing one of their inputs in place, "
                "and the lever attention has not computed them: run without attention."
            )
        if self.before is not None and self.value is None:
            self.before.check()


# -- deferred values -----------------------------------------------------------------------------------------


class _Place(torch.autograd.Function):
    """The place of a deferred tensor in the graph.

    It serves code that bypasses __torch_function__: a script's own autograd.Function, TorchScript, C++.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, held: list[DeferredOperation], like: Tensor, *leaves: Tensor) -> Tensor:
        ctx.held, ctx.leaves = held, leaves
        return DeferredScores(held, like)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Any:
        with torch.enable_grad():
            instead = {id(leaf): leaf.detach().requires_grad_() for leaf in ctx.leaves}
            value = ctx.held[0].made(instead)
            gradients = torch.autograd.grad(value, list(instead.values()), gradient, allow_unused=True)
        return None, None, *gradients


class _Become(torch.autograd.Function):
    """Gives a deferred tensor that was changed in place the graph position of its values."""

    @staticmethod
    def forward(ctx: FunctionCtx, deferred: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(deferred)
        return deferred

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Any:
        return None, gradient


class DeferredScores(torch.Tensor):
    """Scores or weights with a shape, a type and a place in the graph, but no values yet.

    ``held[0]`` computes them. ``like`` has their shape, strides and type.
    """

    held: list[DeferredOperation]

    @staticmethod
    def __new__(cls: type[DeferredScores], held: list[DeferredOperation], like: Tensor) -> DeferredScores:
        made: DeferredScores = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=held[0].device
        )
        made.held = held
        return made

    def __repr__(self, **_: object) -> str:
        return repr(self.held[0].compute())

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if LOOKS_ONLY.fullmatch(function.__self__.__name__ if name == "__get__" else name):
                return function(*args, **kwargs)
            made = _still_deferred(function, name, args, kwargs)
        if made is not None:
            return made
        first = args[0] if args else None
        changes = isinstance(first, DeferredScores) and CHANGES_IT.fullmatch(name) is not None
        if changes and isinstance(first, DeferredScores):
            for operation in list(first.held[0].later):
                operation.compute()  # values from before the change must not see it
        args, kwargs = tree_map_only(
            DeferredScores, lambda deferred: deferred.held[0].compute(), (tuple(args), kwargs)
        )
        result = function(*args, **kwargs)
        if not changes:
            return result
        if args[0].requires_grad and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                _Become.apply(first, args[0])
        return first if result is args[0] else result

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """For code that bypasses __torch_function__.

        This runs below autograd, where ``_Place`` represents this tensor.
        """

        def values(deferred: DeferredScores) -> Tensor:
            with enable_reentrant_dispatch():
                return deferred.held[0].compute().detach()

        args, kwargs = tree_map_only(DeferredScores, values, (tuple(args), kwargs or {}))
        return function(*args, **kwargs)


def _deferred(operation: DeferredOperation, like: Tensor) -> DeferredScores:
    leaves = operation.leaves.values()
    made: DeferredScores = (
        _Place.apply([operation], like, *leaves) if leaves else DeferredScores([operation], like)
    )
    operation.owner = weakref.ref(made)
    return made


def _still_deferred(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of an operator without computing the weights; None if they must be computed."""
    if name not in CHANGES and name not in PRODUCTS and name not in LATER:
        return None
    args = with_operands(name, args)
    places = [at for at, thing in enumerate(args) if isinstance(thing, DeferredScores)]
    if len(places) != 1 or (name == "view" and any(isinstance(thing, torch.dtype) for thing in args)):
        return None
    at, first = places[0], args[places[0]]
    operation: DeferredOperation = first.held[0]
    if operation.value is not None or not torch.is_grad_enabled():
        return None
    tensors = [thing for thing in (*args, *kwargs.values()) if isinstance(thing, Tensor)]
    others = [tensor for tensor in tensors if tensor is not first]
    if not all(type(tensor) in PLAIN if name in PRODUCTS else settled(tensor) for tensor in others):
        return None
    mode, form = operation.mode, operation.form
    if drops(Call(mode.see, name, args, kwargs, at, None)):
        mode.drops = True
        return None
    in_place = name in OUT_OF_PLACE
    function = getattr(torch.Tensor, OUT_OF_PLACE[name]) if in_place else function
    like = shaped_like(function, operation.device, name in VIEWS, args, kwargs)
    if like is None or (
        in_place and (at != 0 or like.dtype is not first.dtype or operation.is_seen_elsewhere)
    ):
        return None
    call = Call(mode.see, name, args, kwargs, at, like)
    if form is not None and name in PRODUCTS:
        match = finished(form, call)
        return None if match is None else mode.attended(match, operation, like)
    longer = None if form is None else extended(form, call)
    if longer is None and not (name in LATER and at == 0 and (form is None or form.is_weights)):
        return None
    args = (*args[:at], operation, *args[at + 1 :])
    following = DeferredOperation(function, args, kwargs, longer, mode, operation.ordinal)
    if name == "detach":
        following.leaves = {}
    if not in_place:
        return _deferred(following, like)
    if following.leaves != operation.leaves:  # this tensor's graph node has no path to the new leaves
        return None
    operation.owner, following.owner = None, weakref.ref(first)
    first.held[0] = following
    return first


# -- the products of one module ------------------------------------------------------------------------------


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
        elif MAKES_MASKS.fullmatch(name) and not any(
            isinstance(thing, Tensor) and (thing.requires_grad or isinstance(thing, DeferredScores))
            for thing in args
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
        tensors = [thing for thing in (*args, *kwargs.values()) if isinstance(thing, Tensor)]
        if any(isinstance(tensor, DeferredScores) for tensor in tensors):
            return None
        ordinal, self._next = self._next, self._next + 1
        if (
            ordinal in self._alone
            or not torch.is_grad_enabled()
            or not all(settled(tensor) and tensor.is_floating_point() for tensor in tensors)
            or torch._C._are_functorch_transforms_active()
            or len({tensor.device for tensor in tensors}) != 1
        ):
            return None
        form = product(self.see, name, args, kwargs)
        like = None if form is None else shaped_like(function, tensors[0].device, False, args, kwargs)
        if form is None or like is None:
            return None
        form = replace(form, dtype=like.dtype)
        return _deferred(DeferredOperation(function, args, kwargs, form, self, ordinal), like)

    def attended(self, match: AttentionMatch, operation: DeferredOperation, like: Tensor) -> Tensor:
        operation.check()
        causal, checked = self.masks.known(match.form)
        with torch.autocast(*autocast_state(operation.device)[:2], enabled=False):
            out: Tensor = attend(self.see, match, causal, checked)
        self.fused[operation.ordinal] += 1
        COUNT[0] += 1
        if out.stride() == like.stride():
            return out
        as_written = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=out.device)
        return as_written.copy_(out)


_unasked_functions: dict[Any, Any] = {}


def _unasked(function: FunctionType) -> Any:
    """A Python function of torch without its has_torch_function check.

    Its own operators can then be observed.
    """
    if function not in _unasked_functions:
        names = {**function.__globals__, "has_torch_function": lambda *_: False}
        own = type(function)(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        _unasked_functions[function] = own
    return _unasked_functions[function]
