"""Scores and weights that are not computed until somebody looks: so that attention that is written by hand can be computed by torch's fused kernel.

Inside ``with watch:`` the product of two matrices may be a tensor without memory that knows how it would be made. Scale, masks, softmax, views and casts
make such tensors of it (``attention_forms`` reads them), and the product with the values becomes ``F.scaled_dot_product_attention`` of what the
script has multiplied. Everything else that meets one computes what the script wrote, operator by operator, and goes on with that: weights that a
script returns, keeps, prints or puts a hook on are those of the plain program, bit for bit. A dropout that draws ends the way, too.

A product that turns out to be no attention, or whose weights are looked at, is left alone from then on (``Watch.step``). Whether a mask is causal is
looked up once for each mask that stays what it is from step to step, as a buffer does; for others nobody waits for their values.
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
    Finished,
    Form,
    attend,
    causal_and_whole,
    drops,
    extended,
    finished,
    product,
    with_operands,
)

PATIENCE_STEPS = 3
COUNT = [0]  # attentions that were computed by the fused kernel in this process
LOOKS_ONLY = frozenset(("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_sparse", "is_quantized",
                        "is_nested", "is_meta", "itemsize", "size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex",
                        "element_size", "is_contiguous", "__len__", "__hash__"))
VIEWS = frozenset(("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "detach", "transpose", "permute", "dropout"))
MAY_BE_VIEWS = VIEWS | {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
LATER = VIEWS - {"dropout", "contiguous"} | {"mean"}  # of weights: nobody need have looked yet
CHANGES_IT = re.compile(r"(?!__)\w+_|__(set|setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__")
MOST_LIKES = 4096


class _See:
    """Arguments of a running program."""

    def __init__(self, numbers: Any = None) -> None:
        self._numbers = numbers

    def tensor(self, thing: Any) -> Any:
        return thing if isinstance(thing, Tensor) else None

    def number(self, thing: Any) -> float | None:
        if isinstance(thing, (int, float)) and not isinstance(thing, bool):
            return float(thing)
        if not isinstance(thing, Tensor) or isinstance(thing, Deferred) or thing.dim() or thing.requires_grad or thing.is_complex():
            return None
        if thing.device.type == "cpu":
            return float(thing)
        return None if self._numbers is None else self._numbers.get(thing)

    def same(self, one: Any, other: Any) -> bool:
        return bool(one == other)


# -- what is not computed yet ----------------------------------------------------------------------------------------------


class Step:
    """One operator that the script has called, with what it was called with, and what it makes once somebody looks."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], form: Form | None, watch: Watch, ordinal: int) -> None:
        """Deferred tensors among the arguments are here as their steps."""
        self.function, self.args, self.kwargs = function, args, kwargs
        self.form, self.watch, self.ordinal = form, watch, ordinal
        self.value: Tensor | None = None
        self.owner: weakref.ref[Deferred] | None = None
        self.later: weakref.WeakSet[Step] = weakref.WeakSet()
        self.before: Step | None = next((each for each in args if isinstance(each, Step)), None)
        self.tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        self.versions = [tensor._version for tensor in self.tensors]
        self.device: torch.device = self.tensors[0].device if self.before is None else self.before.device
        self.autocast = _autocast(self.device)
        self.leaves = {id(tensor): tensor for tensor in self.tensors if tensor.requires_grad}  # what a gradient goes on to
        if self.before is not None:
            self.leaves |= self.before.leaves
            self.before.later.add(self)

    @property
    def is_seen_elsewhere(self) -> bool:
        """Whether this may be a view of another tensor that is alive, or another one a view of this."""
        step = self
        while step.before is not None and step.function.__name__ in MAY_BE_VIEWS:
            step = step.before
            if step.owner is not None and step.owner() is not None:
                return True
        return bool(self.later)

    def compute(self) -> Tensor:
        """What the script would have had here, in its place of the graph. Once looked at it stays."""
        if self.value is None:
            self.watch.looked.add(self.ordinal)
            self.value = self.made({})
        return self.value

    def made(self, instead: dict[int, Tensor]) -> Tensor:
        """The operators of the script, from the start; ``instead`` are other tensors, by the id of those that they stand for."""
        self.check()
        args, kwargs = tree_map_only(Step, lambda step: step.made(instead) if instead else step.compute(), (self.args, self.kwargs))
        if instead:
            args, kwargs = tree_map_only(Tensor, lambda tensor: instead.get(id(tensor), tensor), (args, kwargs))
        device, dtype, enabled = self.autocast
        with torch.inference_mode(False), torch.autocast(device, dtype, enabled):  # this enables gradients, too, as they were
            found: Tensor = self.function(*args, **kwargs)
        return found


    def check(self) -> None:
        """Raises RuntimeError where the script has computed this from values that are no longer there."""
        if [tensor._version for tensor in self.tensors] != self.versions:
            raise RuntimeError("these attention weights are used after something that they are made of was changed in place, "
                               "and the lever attention had not computed them: run without attention.")
        if self.before is not None and self.value is None:
            self.before.check()


class _Place(torch.autograd.Function):
    """The place of a deferred tensor in the graph, for those who take it without asking: a script's own autograd.Function, TorchScript, C++."""

    @staticmethod
    def forward(ctx: Any, held: list[Step], like: Tensor, *leaves: Tensor) -> Tensor:
        ctx.held, ctx.leaves = held, leaves
        return Deferred(held, like, leaves[0].device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            instead = {id(leaf): leaf.detach().requires_grad_() for leaf in ctx.leaves}
            found = torch.autograd.grad(ctx.held[0].made(instead), list(instead.values()), gradient, allow_unused=True)
        return None, None, *found


class _Become(torch.autograd.Function):
    """A deferred tensor that was changed in place has the place of its values in the graph."""

    @staticmethod
    def forward(ctx: Any, deferred: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(deferred)
        return deferred

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient


class Deferred(torch.Tensor):
    """Scores or weights that have a shape, a type and a place in the graph, and no values yet. ``held[0]`` is the step that makes them."""

    held: list[Step]

    @staticmethod
    def __new__(cls: type[Deferred], held: list[Step], like: Tensor, device: torch.device) -> Deferred:
        made: Deferred = torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
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
        changes = isinstance(first, Deferred) and CHANGES_IT.fullmatch(name) is not None
        if changes and isinstance(first, Deferred):
            for step in list(first.held[0].later):
                step.compute()  # what was made before the change must not see it
        args, kwargs = tree_map_only(Deferred, lambda deferred: deferred.held[0].compute(), (tuple(args), kwargs))
        result = function(*args, **kwargs)
        if not changes:
            return result
        if args[0].requires_grad and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                _Become.apply(first, args[0])
        return first if result is args[0] else result

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """For those who do not ask: below autograd, where ``_Place`` stands for this tensor."""
        def values(deferred: Deferred) -> Tensor:
            with enable_reentrant_dispatch():
                return deferred.held[0].compute().detach()

        args, kwargs = tree_map_only(Deferred, values, (tuple(args), kwargs or {}))
        return function(*args, **kwargs)


def _deferred(step: Step, like: Tensor, device: torch.device) -> Deferred:
    made: Deferred = _Place.apply([step], like, *step.leaves.values()) if step.leaves else Deferred([step], like, device)
    step.owner = weakref.ref(made)
    return made


# -- what an operator makes ------------------------------------------------------------------------------------------------


def _still_deferred(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator without computing the weights; None where they have to be."""
    if name not in CHANGES and name not in PRODUCTS and name not in LATER:
        return None
    args = with_operands(name, args)
    found = [at for at, each in enumerate(args) if isinstance(each, Deferred)]
    if len(found) != 1 or (name == "view" and any(isinstance(each, torch.dtype) for each in args)):
        return None
    at, first = found[0], args[found[0]]
    step: Step = first.held[0]
    if step.value is not None or not torch.is_grad_enabled():
        return None
    others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each is not first]
    if not all(type(each) in (Tensor, torch.nn.Parameter) if name in PRODUCTS else _settled(each) for each in others):
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
    longer = Step(function, (*args[:at], step, *args[at + 1 :]), kwargs, form, step.watch, step.ordinal)
    if name == "detach":
        longer.leaves = {}
    if not inside:
        return _deferred(longer, like, first.device)
    if longer.leaves != step.leaves:  # the place of this tensor in the graph has no way to the new ones
        return None
    step.owner, longer.owner = None, weakref.ref(first)
    first.held[0] = longer
    return first


def _settled(thing: Tensor) -> bool:
    """Whether this can be used later: an optimizer changes weights, and nothing else is expected to change what a graph is made of."""
    if type(thing) not in (Tensor, torch.nn.Parameter) or thing.is_inference():
        return False
    source = thing if thing._base is None else thing._base
    return not (source.requires_grad and source.is_leaf)


_likes: dict[Any, Tensor | None] = {}


def _like(function: Any, device: torch.device, keeps_type: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A tensor without memory that has the shape, strides and type of what this operator makes; None where it makes none, or fails.

    Sizes are computed on the meta device; the type by the operator itself, from tiny tensors, under the autocast of the moment.
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
            kind = next(each.dtype for each in args if isinstance(each, Tensor)) if keeps_type else function(*_each(_tiny, args), **_each(_tiny, kwargs)).dtype
        except Exception:  # it will be called again, and fail where the script sees it
            return None
    _likes[key] = torch.empty_strided(made.shape, made.stride(), dtype=kind, device="meta")
    return _likes[key]


def _each(change: Callable[[Tensor], Tensor], things: Any) -> Any:
    return tree_map_only(Tensor, change, things)


def _without_memory(tensor: Tensor) -> Tensor:
    """Floating types are one: which of them autocast makes of two is asked elsewhere."""
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _tiny(tensor: Tensor) -> Tensor:
    """With axes of two: products over an axis of one are computed in another way."""
    return torch.zeros((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def _key(things: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((tuple(each.shape), each.stride(), each.dtype, each.device) if isinstance(each, Tensor) else _key(tuple(each))
                 if isinstance(each, (list, tuple)) else (type(each), each) for each in things)


def _autocast(device: torch.device) -> tuple[str, torch.dtype, bool]:
    return device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)


# -- masks that stay what they are -----------------------------------------------------------------------------------------


class Masks:
    """Names for the values of tensors: two tensors with one name have the same values. What a mask is, is found out once for each name."""

    def __init__(self) -> None:
        self.numbers = WeakIdKeyDictionary()  # tensors of one number
        self._names = WeakIdKeyDictionary()
        self._serials = WeakIdKeyDictionary()
        self._count = 0
        self._seen: tuple[set[Any], set[Any]] = set(), set()  # in earlier steps, and in this one
        self._waiting: dict[Any, Form] = {}
        self._found: dict[Any, tuple[bool, bool]] = {}

    def step(self) -> None:
        """Between two steps, when nobody records a graph of the forward pass: now values are read."""
        self._seen = self._seen[1], set()
        self._found |= {name: causal_and_whole(form) for name, form in self._waiting.items()}
        self._waiting.clear()

    def follow(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it, and name what it makes."""
        made = function(*args, **kwargs)
        if type(made) is Tensor and not made.requires_grad:
            try:
                made_by = (name, *(self._name(each) for each in args), *((key, self._name(kwargs[key])) for key in sorted(kwargs)))
                hash(made_by)
            except TypeError:
                return made
            self._names[made] = made_by, made._version
            value = {"full": (*args[1:2], kwargs.get("fill_value"))[0], "tensor": (*args[:1], None)[0]}.get(name)
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

    def known(self, form: Form) -> tuple[bool, bool]:
        """Whether the masks of this form are one causal mask, and whether no row is masked altogether; both False where nobody knows yet."""
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


# -- the products of one module --------------------------------------------------------------------------------------------


class Watch(TorchFunctionMode):
    """While it is entered, products may be deferred. It knows the products of one module by their order in a forward pass, from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = Masks()
        self.see = _See(self.masks.numbers)
        self.fused: Counter[int] = Counter()
        self.drops = self.calls = False  # the script drops weights at random, or calls the fused kernel itself
        self.looked: set[int] = set()  # products, since the last step
        self._looks: Counter[int] = Counter()
        self._alone: set[int] = set()
        self.passes = self._next = self._most = 0

    @property
    def idle(self) -> bool:
        return 0 < self._most <= len(self._alone)

    def step(self) -> None:
        """Between two steps of the optimizer, never between a forward pass and its backward pass, which may compute it again."""
        self._looks.update(self.looked)
        self.looked = set()
        self._alone = {ordinal for ordinal, steps in self._looks.items() if steps >= PATIENCE_STEPS}
        self.masks.step()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward pass of the module."""
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
        elif name in MAKES_MASKS and not any(isinstance(each, Tensor) and (each.requires_grad or isinstance(each, Deferred)) for each in args):
            return self.masks.follow(function, name, args, kwargs)
        elif function is torch.nn.functional.multi_head_attention_forward:
            with self:
                return _unasked(function)(*args, **kwargs)
        return function(*args, **kwargs)

    def _product(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        args = with_operands(name, args)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if any(isinstance(each, Deferred) for each in tensors):
            return None
        ordinal, self._next = self._next, self._next + 1
        if (ordinal in self._alone or not torch.is_grad_enabled() or not all(map(_settled, tensors)) or not all(each.is_floating_point() for each in tensors)
                or torch._C._are_functorch_transforms_active() or len({each.device for each in tensors}) != 1):
            return None
        form = product(self.see, name, args, kwargs)
        like = None if form is None else _like(function, tensors[0].device, False, args, kwargs)
        if form is None or like is None:
            return None
        return _deferred(Step(function, args, kwargs, replace(form, dtype=like.dtype), self, ordinal), like, tensors[0].device)

    def attended(self, whole: Finished, step: Step, like: Tensor) -> Tensor:
        step.check()
        causal, checked = self.masks.known(whole.form)
        device, dtype, _ = _autocast(step.device)
        with torch.autocast(device, dtype, enabled=False):
            found: Tensor = attend(self.see, whole, causal, checked)
        self.fused[step.ordinal] += 1
        COUNT[0] += 1
        if found.stride() == like.stride():
            return found
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=found.device).copy_(found)


_unasked_functions: dict[Any, Any] = {}


def _unasked(function: Any) -> Any:
    """A function of torch that is written in Python, without its question whether somebody stands in for it: its own operators are to be seen."""
    if function not in _unasked_functions:
        known = {**function.__globals__, "has_torch_function": lambda *_: False}
        own = type(function)(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
        own.__kwdefaults__ = function.__kwdefaults__
        _unasked_functions[function] = own
    return _unasked_functions[function]
