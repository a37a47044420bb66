"""Defer attention scores and weights until something reads them.

This lets torch's fused kernel compute the attention.

Inside ``with watch:``, the product of two matrices may become a tensor without memory that records how to
compute it. Scale, masks, softmax, views and casts extend such tensors (``attention_forms`` interprets them),
and the product with the values becomes ``F.scaled_dot_product_attention`` of the script's inputs. Any other
operation computes what the script wrote, operator by operator, and continues with the result. So weights that
a script returns, keeps, prints or hooks equal those of the plain program, bit for bit. A dropout that draws
random numbers also ends the deferral.

A product that is not attention, or whose weights are read, is left alone from then on (``Watch.step``).
Whether a mask is causal is determined once for each mask that stays constant from step to step, as a buffer
does. For other masks, nothing waits for their values.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_map_only

from flatout.kernels.attend import finished
from flatout.kernels.attention_forms import CHANGES, OUT_OF_PLACE, drops, extended
from flatout.kernels.attention_operation import VIEWS, DeferredOperation, autocast_state
from flatout.kernels.attention_products import PRODUCTS, with_operands

LOOKS_ONLY = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_meta",
        "itemsize",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "is_floating_point",
        "is_complex",
        "element_size",
        "is_contiguous",
        "__len__",
        "__hash__",
    )
)
LATER = VIEWS - {"dropout", "contiguous"} | {"mean"}  # operators on weights that need no values yet
CHANGES_IT = re.compile(
    r"(?!__)\w+_|__(set|setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
)
MOST_LIKES = 4096


class RuntimeArguments:
    """Reads arguments of a running program."""

    def __init__(self, numbers: Any = None) -> None:
        self._numbers = numbers

    def tensor(self, thing: object) -> Any:
        return thing if isinstance(thing, Tensor) else None

    def number(self, thing: object) -> float | None:
        if isinstance(thing, (int, float)) and not isinstance(thing, bool):
            return float(thing)
        if (
            not isinstance(thing, Tensor)
            or isinstance(thing, DeferredScores)
            or thing.dim()
            or thing.requires_grad
            or thing.is_complex()
        ):
            return None
        if thing.device.type == "cpu":
            return float(thing)
        return None if self._numbers is None else self._numbers.get(thing)

    def same(self, one: object, other: object) -> bool:
        return bool(one == other)


# -- deferred values -----------------------------------------------------------------------------------------


class _Place(torch.autograd.Function):
    """The place of a deferred tensor in the graph.

    It serves code that bypasses __torch_function__: a script's own autograd.Function, TorchScript, C++.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, held: list[DeferredOperation], like: Tensor, *leaves: Tensor) -> Tensor:
        ctx.held, ctx.leaves = held, leaves
        return DeferredScores(held, like, leaves[0].device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Any:
        with torch.enable_grad():
            instead = {id(leaf): leaf.detach().requires_grad_() for leaf in ctx.leaves}
            found = torch.autograd.grad(
                ctx.held[0].made(instead), list(instead.values()), gradient, allow_unused=True
            )
        return None, None, *found


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

    ``held[0]`` computes them.
    """

    held: list[DeferredOperation]

    @staticmethod
    def __new__(
        cls: type[DeferredScores], held: list[DeferredOperation], like: Tensor, device: torch.device
    ) -> DeferredScores:
        made: DeferredScores = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.held = held
        return made

    def __repr__(self, **_: object) -> str:
        return repr(self.held[0].compute())

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        if (function.__self__.__name__ if name == "__get__" else name) in LOOKS_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            made = _still_deferred(function, name, args, kwargs)
        if made is not None:
            return made
        first = args[0] if args else None
        changes = isinstance(first, DeferredScores) and CHANGES_IT.fullmatch(name) is not None
        if changes and isinstance(first, DeferredScores):
            for step in list(first.held[0].later):
                step.compute()  # values from before the change must not see it
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


def deferred_tensor(step: DeferredOperation, like: Tensor, device: torch.device) -> DeferredScores:
    made: DeferredScores = (
        _Place.apply([step], like, *step.leaves.values())
        if step.leaves
        else DeferredScores([step], like, device)
    )
    step.owner = weakref.ref(made)
    return made


# -- results of operators ------------------------------------------------------------------------------------


def _still_deferred(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of an operator without computing the weights; None if they must be computed."""
    if name not in CHANGES and name not in PRODUCTS and name not in LATER:
        return None
    args = with_operands(name, args)
    found = [at for at, each in enumerate(args) if isinstance(each, DeferredScores)]
    if len(found) != 1 or (name == "view" and any(isinstance(each, torch.dtype) for each in args)):
        return None
    at, first = found[0], args[found[0]]
    step: DeferredOperation = first.held[0]
    if step.value is not None or not torch.is_grad_enabled():
        return None
    others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each is not first]
    if not all(
        type(each) in (Tensor, torch.nn.Parameter) if name in PRODUCTS else settled(each) for each in others
    ):
        return None
    if drops(step.watch.see, name, args, kwargs):
        step.watch.drops = True
        return None
    inside = name in OUT_OF_PLACE
    function = getattr(torch.Tensor, OUT_OF_PLACE[name]) if inside else function
    like = shaped_like(function, step.device, name in VIEWS, args, kwargs)
    if like is None or (inside and (at != 0 or like.dtype is not first.dtype or step.is_seen_elsewhere)):
        return None
    if step.form is not None and name in PRODUCTS:
        whole = finished(step.watch.see, name, step.form, at, args, kwargs, like)
        return None if whole is None else step.watch.attended(whole, step, like)
    form = None if step.form is None else extended(step.watch.see, name, step.form, at, args, kwargs, like)
    if form is None and not (name in LATER and at == 0 and (step.form is None or step.form.is_weights)):
        return None
    longer = DeferredOperation(
        function, (*args[:at], step, *args[at + 1 :]), kwargs, form, step.watch, step.ordinal
    )
    if name == "detach":
        longer.leaves = {}
    if not inside:
        return deferred_tensor(longer, like, first.device)
    if longer.leaves != step.leaves:  # this tensor's graph node has no path to the new leaves
        return None
    step.owner, longer.owner = None, weakref.ref(first)
    first.held[0] = longer
    return first


def settled(thing: Tensor) -> bool:
    """Whether this tensor can be used later.

    An optimizer changes weights; other inputs of a graph are not expected to change.
    """
    if type(thing) not in (Tensor, torch.nn.Parameter) or thing.is_inference():
        return False
    source = thing if thing._base is None else thing._base
    return not (source.requires_grad and source.is_leaf)


_likes: dict[Any, Tensor | None] = {}


def shaped_like(
    function: Callable[..., Any],
    device: torch.device,
    keeps_type: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor | None:
    """A tensor without memory with the shape, strides and type of the operator's result.

    None if the operator returns no tensor, or fails. Sizes are computed on the meta device; the type is
    determined by the operator itself, from tiny tensors, under the present autocast.
    """
    autocast = autocast_state(device)
    try:
        key = (function, _key(args), _key(tuple(sorted(kwargs.items()))), autocast)
        if key in _likes:
            return _likes[key]
    except TypeError:  # an argument that cannot be hashed
        return None
    if len(_likes) >= MOST_LIKES:
        _likes.clear()
    _likes[key] = None
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            with torch.autocast(autocast[0], autocast[1], enabled=False):
                made = function(*_each(_without_memory, args), **_each(_without_memory, kwargs))
            kind = (
                next(each.dtype for each in args if isinstance(each, Tensor))
                if keeps_type
                else function(*_each(_tiny, args), **_each(_tiny, kwargs)).dtype
            )
        except Exception:  # the real call fails in the script
            return None
    _likes[key] = torch.empty_strided(made.shape, made.stride(), dtype=kind, device="meta")
    return _likes[key]


def _each(change: Callable[[Tensor], Tensor], things: Any) -> Any:
    return tree_map_only(Tensor, change, things)


def _without_memory(tensor: Tensor) -> Tensor:
    """All floating types count as one here; ``shaped_like`` determines the type under autocast separately."""
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _tiny(tensor: Tensor) -> Tensor:
    """Axes of two, because products over an axis of one are computed differently."""
    return torch.zeros((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def _key(things: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        (tuple(each.shape), each.stride(), each.dtype, each.device)
        if isinstance(each, Tensor)
        else _key(tuple(each))
        if isinstance(each, (list, tuple))
        else (type(each), each)
        for each in things
    )


# -- constant masks ------------------------------------------------------------------------------------------


# -- the products of one module ------------------------------------------------------------------------------
