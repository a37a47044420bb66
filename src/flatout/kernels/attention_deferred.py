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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, enable_reentrant_dispatch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from flatout.kernels.attention_forms import (
    CHANGES,
    MAKES_MASKS,
    OUT_OF_PLACE,
    PRODUCTS,
    AttentionForm,
    AttentionMatch,
    attend,
    causal_and_whole,
    drops,
    extended,
    finished,
    product,
    with_operands,
)

PATIENCE_STEPS = 3
COUNT = [0]  # attentions computed by the fused kernel in this process
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
VIEWS = frozenset(
    (
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "contiguous",
        "detach",
        "transpose",
        "permute",
        "dropout",
    )
)
MAY_BE_VIEWS = VIEWS | {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
LATER = VIEWS - {"dropout", "contiguous"} | {"mean"}  # operators on weights that need no values yet
CHANGES_IT = re.compile(
    r"(?!__)\w+_|__(set|setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
)
MOST_LIKES = 4096


class _RuntimeArguments:
    """Reads arguments of a running program."""

    def __init__(self, numbers: Any = None) -> None:
        self._numbers = numbers

    def tensor(self, thing: Any) -> Any:
        return thing if isinstance(thing, Tensor) else None

    def number(self, thing: Any) -> float | None:
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

    def same(self, one: Any, other: Any) -> bool:
        return bool(one == other)


# -- deferred values -----------------------------------------------------------------------------------------


class DeferredOperation:
    """One operator call of the script with its arguments, and the value once something reads it."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        form: AttentionForm | None,
        watch: AttentionMode,
        ordinal: int,
    ) -> None:
        """Deferred tensors among the arguments are represented by their steps."""
        self.function, self.args, self.kwargs = function, args, kwargs
        self.form, self.watch, self.ordinal = form, watch, ordinal
        self.value: Tensor | None = None
        self.owner: weakref.ref[DeferredScores] | None = None
        self.later: weakref.WeakSet[DeferredOperation] = weakref.WeakSet()
        self.before: DeferredOperation | None = next(
            (each for each in args if isinstance(each, DeferredOperation)), None
        )
        self.tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        self.versions = [tensor._version for tensor in self.tensors]
        self.device: torch.device = self.tensors[0].device if self.before is None else self.before.device
        self.autocast = _autocast(self.device)
        self.leaves = {
            id(tensor): tensor for tensor in self.tensors if tensor.requires_grad
        }  # inputs that receive a gradient
        if self.before is not None:
            self.leaves |= self.before.leaves
            self.before.later.add(self)

    @property
    def is_seen_elsewhere(self) -> bool:
        """Whether this may be a view of another live tensor, or another tensor a view of this."""
        step = self
        while step.before is not None and step.function.__name__ in MAY_BE_VIEWS:
            step = step.before
            if step.owner is not None and step.owner() is not None:
                return True
        return bool(self.later)

    def compute(self) -> Tensor:
        """The value that the script would have had here, in the same place of the graph.

        It is kept once computed.
        """
        if self.value is None:
            self.watch.looked.add(self.ordinal)
            self.value = self.made({})
        return self.value

    def made(self, instead: dict[int, Tensor]) -> Tensor:
        """Run the operators of the script from the start.

        ``instead`` maps ids of tensors to their replacements.
        """
        self.check()
        args, kwargs = tree_map_only(
            DeferredOperation,
            lambda step: step.made(instead) if instead else step.compute(),
            (self.args, self.kwargs),
        )
        if instead:
            args, kwargs = tree_map_only(
                Tensor, lambda tensor: instead.get(id(tensor), tensor), (args, kwargs)
            )
        device, dtype, enabled = self.autocast
        with (
            torch.inference_mode(False),
            torch.autocast(device, dtype, enabled),
        ):  # this also enables gradients, as before
            found: Tensor = self.function(*args, **kwargs)
        return found

    def check(self) -> None:
        """Raises RuntimeError if the values from which the script computed this no longer exist."""
        if [tensor._version for tensor in self.tensors] != self.versions:
            raise RuntimeError(
                "the script uses attention weights after changing one of their inputs in place, "
                "and the lever attention has not computed them: run without attention."
            )
        if self.before is not None and self.value is None:
            self.before.check()


class _Place(torch.autograd.Function):
    """The place of a deferred tensor in the graph.

    It serves code that bypasses __torch_function__: a script's own autograd.Function, TorchScript, C++.
    """

    @staticmethod
    def forward(ctx: Any, held: list[DeferredOperation], like: Tensor, *leaves: Tensor) -> Tensor:
        ctx.held, ctx.leaves = held, leaves
        return DeferredScores(held, like, leaves[0].device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            instead = {id(leaf): leaf.detach().requires_grad_() for leaf in ctx.leaves}
            found = torch.autograd.grad(
                ctx.held[0].made(instead), list(instead.values()), gradient, allow_unused=True
            )
        return None, None, *found


class _Become(torch.autograd.Function):
    """Gives a deferred tensor that was changed in place the graph position of its values."""

    @staticmethod
    def forward(ctx: Any, deferred: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(deferred)
        return deferred

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
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

    def __repr__(self, **_: Any) -> str:
        return repr(self.held[0].compute())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """For code that bypasses __torch_function__.

        This runs below autograd, where ``_Place`` represents this tensor.
        """

        def values(deferred: DeferredScores) -> Tensor:
            with enable_reentrant_dispatch():
                return deferred.held[0].compute().detach()

        args, kwargs = tree_map_only(DeferredScores, values, (tuple(args), kwargs or {}))
        return function(*args, **kwargs)


def _deferred(step: DeferredOperation, like: Tensor, device: torch.device) -> DeferredScores:
    made: DeferredScores = (
        _Place.apply([step], like, *step.leaves.values())
        if step.leaves
        else DeferredScores([step], like, device)
    )
    step.owner = weakref.ref(made)
    return made


# -- results of operators ------------------------------------------------------------------------------------


def _still_deferred(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        type(each) in (Tensor, torch.nn.Parameter) if name in PRODUCTS else _settled(each) for each in others
    ):
        return None
    if drops(step.watch.see, name, args, kwargs):
        step.watch.drops = True
        return None
    inside = name in OUT_OF_PLACE
    function = getattr(torch.Tensor, OUT_OF_PLACE[name]) if inside else function
    like = _like(function, step.device, name in VIEWS, args, kwargs)
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
        return _deferred(longer, like, first.device)
    if longer.leaves != step.leaves:  # this tensor's graph node has no path to the new leaves
        return None
    step.owner, longer.owner = None, weakref.ref(first)
    first.held[0] = longer
    return first


def _settled(thing: Tensor) -> bool:
    """Whether this tensor can be used later.

    An optimizer changes weights; other inputs of a graph are not expected to change.
    """
    if type(thing) not in (Tensor, torch.nn.Parameter) or thing.is_inference():
        return False
    source = thing if thing._base is None else thing._base
    return not (source.requires_grad and source.is_leaf)


_likes: dict[Any, Tensor | None] = {}


def _like(
    function: Any, device: torch.device, keeps_type: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """A tensor without memory with the shape, strides and type of the operator's result.

    None if the operator returns no tensor, or fails. Sizes are computed on the meta device; the type is
    determined by the operator itself, from tiny tensors, under the present autocast.
    """
    autocast = _autocast(device)
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
    """All floating types count as one here; ``_like`` determines the type under autocast separately."""
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


def _autocast(device: torch.device) -> tuple[str, torch.dtype, bool]:
    return device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)


# -- constant masks ------------------------------------------------------------------------------------------


class MaskRegistry:
    """Names for the values of tensors: tensors with one name have the same values.

    The kind of a mask is determined once per name.
    """

    def __init__(self) -> None:
        self.numbers = WeakIdKeyDictionary()  # tensors of one number
        self._names = WeakIdKeyDictionary()
        self._serials = WeakIdKeyDictionary()
        self._count = 0
        self._seen: tuple[set[Any], set[Any]] = set(), set()  # in earlier steps, in this step
        self._waiting: dict[Any, AttentionForm] = {}
        self._found: dict[Any, tuple[bool, bool]] = {}

    def step(self) -> None:
        """Between two steps, when no graph of the forward pass is being recorded: read values now."""
        self._seen = self._seen[1], set()
        self._found |= {name: causal_and_whole(form) for name, form in self._waiting.items()}
        self._waiting.clear()

    def follow(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function and name its result."""
        made = function(*args, **kwargs)
        if type(made) is Tensor and not made.requires_grad:
            try:
                made_by = (
                    name,
                    *(self._name(each) for each in args),
                    *((key, self._name(kwargs[key])) for key in sorted(kwargs)),
                )
                hash(made_by)
            except TypeError:
                return made
            self._names[made] = made_by, made._version
            value = {"full": (*args[1:2], kwargs.get("fill_value"))[0], "tensor": (*args[:1], None)[0]}.get(
                name
            )
            if isinstance(value, (int, float)) and not made.dim() and made.is_floating_point():
                self.numbers[made] = float(value)
        return made

    def _name(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            if thing.requires_grad or type(thing) not in (Tensor, torch.nn.Parameter) or thing.is_inference():
                raise TypeError
            made_by, version = self._names.get(thing, (None, 0))
            if made_by is not None and version == thing._version:
                return made_by
            if thing not in self._serials:
                self._count += 1
                self._serials[thing] = self._count
            return self._serials[thing], thing._version
        if isinstance(thing, slice):
            return slice, self._name(thing.start), self._name(thing.stop), self._name(thing.step)
        return tuple(map(self._name, thing)) if isinstance(thing, (list, tuple)) else (type(thing), thing)

    def known(self, form: AttentionForm) -> tuple[bool, bool]:
        """Whether the masks of this form are one causal mask, and whether no row is fully masked.

        Both are False while unknown.
        """
        if len(form.masks) != 1 or form.masks[0].tensor.requires_grad:
            return False, False
        mask = form.masks[0]
        try:
            name = mask.kind, form.rows, form.columns, self._name(mask.tensor)
        except TypeError:
            return False, False
        self._seen[1].add(name)
        if name not in self._found and name in self._seen[0]:
            self._waiting[name] = replace(form, q=None, k=None)
        return self._found.get(name, (False, False))


# -- the products of one module ------------------------------------------------------------------------------


class AttentionMode(TorchFunctionMode):
    """While entered, products may be deferred.

    Products of a module are identified by their order in a forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.masks = MaskRegistry()
        self.see = _RuntimeArguments(self.masks.numbers)
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

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        args = with_operands(name, args)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if any(isinstance(each, DeferredScores) for each in tensors):
            return None
        ordinal, self._next = self._next, self._next + 1
        if (
            ordinal in self._alone
            or not torch.is_grad_enabled()
            or not all(map(_settled, tensors))
            or not all(each.is_floating_point() for each in tensors)
            or torch._C._are_functorch_transforms_active()
            or len({each.device for each in tensors}) != 1
        ):
            return None
        form = product(self.see, name, args, kwargs)
        like = None if form is None else _like(function, tensors[0].device, False, args, kwargs)
        if form is None or like is None:
            return None
        return _deferred(
            DeferredOperation(function, args, kwargs, replace(form, dtype=like.dtype), self, ordinal),
            like,
            tensors[0].device,
        )

    def attended(self, whole: AttentionMatch, step: DeferredOperation, like: Tensor) -> Tensor:
        step.check()
        causal, checked = self.masks.known(whole.form)
        device, dtype, _ = _autocast(step.device)
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


def _unasked(function: Any) -> Any:
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
