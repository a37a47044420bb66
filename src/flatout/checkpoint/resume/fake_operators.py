"""Answers torch functions on fake tensors immediately, without computing.

During a replay, a torch function mode intercepts each function that the script calls. For a function of fake
tensors or weights, torch's FakeTensorMode computes the result's shape once per kind of arguments; from then
on a table answers. A tensor that is written to becomes a fake tensor, under every name it has:
`torch.utils.swap_tensors` changes a tensor without changing who holds it. The same call restores the values
at the resume point.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from flatout.agent.masks import has_mask
from flatout.checkpoint.resume.fake_tensors import (
    NOWHERE,
    ReplayTensor,
    is_without,
    meta_of,
    takes_gradient,
    tensors_in,
    trains,
)
from flatout.checkpoint.resume.gradient_sources import ById, GradFn, GradientSources, Handle
from flatout.checkpoint.resume.operator_names import (
    GETTERS,
    IN_PLACE,
    NATIVE,
    PACKED,
    READS_VALUES,
    SHAPING,
    WITHOUT_GRADIENT,
)

if TYPE_CHECKING:
    from torch import Tensor

Refuse = Callable[[str], NoReturn]
Way = Callable[[tuple[Any, ...], dict[str, Any]], Any]
autocasts = torch._C._is_any_autocast_enabled


class FakeOperators:
    """Answers functions of fake tensors.

    ``refuse`` gets a reason for what is unsupported, and does not return.
    """

    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse
        # set from outside: the recorded result of mask indexing at a place in the code
        self.shaped_again: Callable[[int], Any] = self._not_followed
        # memory of real tensors that were written to; other tensors may share it
        self.memory: set[int] = set()
        self._known: dict[Any, Any] = {}
        self._ways: dict[Any, Way] = {}
        self._fake: Any = None
        self.gradient_sources = GradientSources()
        self._special: dict[str, Callable[..., Any]] = {
            "backward": self._backward,
            "requires_grad": self._requires_grad,
            "grad_fn": self._grad_fn,
            "retain_grad": lambda tensor: None,
            "requires_grad_": self._requires_grad_,
            "to": self._to,
            "type": self._to,
            "__iter__": lambda tensor: iter(tensor.unbind(0)),
            # unsupported by torch's FakeTensor
            "pin_memory": lambda tensor, device=None: ReplayTensor(meta_of(tensor)),
            "register_hook": self._hook,
            "tensor": self._from_values,
            "as_tensor": self._from_values,
            "is_leaf": lambda tensor: (
                tensor.is_leaf if type(tensor) is not ReplayTensor else not tensor.sources
            ),
        }

    def mode(self) -> Any:
        """Return the mode that intercepts each torch function."""
        ways, way_of = self._ways, self._way_of

        class Answering(torch.overrides.TorchFunctionMode):
            off = False

            def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
                if not self.off:
                    for arg in args:
                        if type(arg) is ReplayTensor or trains(arg):
                            return (ways.get(func) or way_of(func))(args, kwargs or {})
                    if kwargs and any(map(trains, kwargs.values())):
                        return (ways.get(func) or way_of(func))(args, kwargs)
                return func(*args, **(kwargs or {}))

        return Answering()

    # -- answering a function -------------------------------------------------------------------------------

    def _way_of(self, func: Callable[..., Any]) -> Way:
        """Return how calls of a function are answered from here on."""
        way = self._ways[func] = self._found_way(func, name_of(func))
        return way

    def _found_way(self, func: Callable[..., Any], name: str) -> Way:
        special = self._special.get(name.removeprefix("get "))
        if name == "data.__set__":
            return self._data_set
        if (
            name in NATIVE
            or name.endswith(("__set__", "__delete__"))
            or (name.startswith("get ") and name[4:] in GETTERS)
        ):
            return lambda args, kwargs: func(*args, **kwargs)
        if special is not None:
            return (
                (lambda args, kwargs: special(args[0]))
                if name.startswith("get ")
                else (lambda args, kwargs: special(*args, **kwargs))
            )
        if name == "get data":
            return lambda args, kwargs: ReplayTensor(meta_of(args[0]))
        if name.removeprefix("get ") in READS_VALUES:
            return partial(self._values_read, name.removeprefix("get "), func)
        if name == "__getitem__":
            return partial(self._indexed, func)
        if name in PACKED:
            return partial(self._without_packed, name, func)
        if name == "__setitem__":
            return lambda args, kwargs: self._written(name, func, [args[0]], args, kwargs, None)
        if name.startswith("get "):  # called with the tensor and its class
            return lambda args, kwargs: self.answered(func, args[:1], {}, name[4:] not in WITHOUT_GRADIENT)
        if name.startswith(("_foreach_", "_fused_", "_amp_")):
            return partial(self._many, name, func)
        if (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE:
            return partial(self._in_place, name, func)
        answered, has_gradient = self.answered, name not in WITHOUT_GRADIENT

        def way(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs and kwargs.get("out") is not None:
                return self._in_place(name, func, args, kwargs)
            return answered(func, args, kwargs, has_gradient)

        return way

    def _indexed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not has_mask(args[1]):
            return self.answered(func, (args[0], _any_place(args[1])), kwargs)
        found = self.shaped_again(sys._getframe(2).f_lasti)  # of the caller: the mode is in between
        found.sources = (
            self.gradient_sources.of(list(args))
            if torch.is_grad_enabled() and takes_gradient(found.meta)
            else NOWHERE
        )
        return found

    def _without_packed(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Reject packed sequences: the values of their lengths decide the shapes."""
        if name.endswith("_sequence") or (isinstance(args[1], torch.Tensor) and args[1].dtype is torch.int64):
            self.refuse("packed sequences (pack_padded_sequence) cannot be replayed")
        return self.answered(func, args, kwargs)

    def _data_set(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the values of weights, in their new shape."""
        target, value = args
        if type(value) is ReplayTensor or trains(value):
            if target.requires_grad and type(target) is not ReplayTensor:
                if target.shape != value.shape or target.dtype != value.dtype:
                    size, stride, dtype, device = meta_of(value)
                    target.data = torch.empty_strided(size, stride, dtype=dtype, device=device)
            else:
                self._swap(target, ReplayTensor(meta_of(value), self.gradient_sources.of(target)))
        elif type(target) is ReplayTensor:
            self._swap(target, ReplayTensor(meta_of(value), target.sources))
        else:
            target.data = value

    def _values_read(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "__deepcopy__":  # with the memo of copies
            return ReplayTensor(args[0].meta) if type(args[0]) is ReplayTensor else func(*args)
        if any(is_without(arg) for arg in args):
            self.refuse(f"{name} of a tensor computed in training cannot be replayed")
        return func(*args, **kwargs)

    # -- in-place functions ---------------------------------------------------------------------------------

    def _in_place(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer an in-place function: it returns the tensor it writes to."""
        found = kwargs.get("out")
        if found is None:
            found = args[0] if args else next(iter(tensors_in([*kwargs.values()])))
        return self._written(
            name, func, [found] if isinstance(found, torch.Tensor) else found, args, kwargs, found
        )

    def _written(
        self,
        name: str,
        func: Callable[..., Any],
        targets: Iterable[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
    ) -> Any:
        targets = list(targets)
        others = [each for each in (*args, *kwargs.values()) if not any(each is target for target in targets)]
        drawn = any(is_without(each) for each in others)
        if not drawn and not any(type(target) is ReplayTensor for target in targets):
            return func(*args, **kwargs)  # no computed tensors, e.g. weight initialisation
        sources = NOWHERE
        if torch.is_grad_enabled() and name not in ("detach_", "zero_", "fill_"):
            for each in others:
                sources = self.gradient_sources.union(sources, self.gradient_sources.of(each))
        for target in targets:
            self._becomes(target, sources)
        if name in SHAPING and isinstance(result, ReplayTensor):
            metas, _, _ = self._asked(func, args, kwargs)
            self._swap(result, ReplayTensor(metas[0], result.sources))
        return result

    def _many(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a function of lists of tensors; names that end in ``_`` write to all lists that they may."""
        if kwargs.get("out") is not None:
            return self._in_place(name, func, args, kwargs)
        if not name.endswith("_"):
            return self.answered(func, args, kwargs)
        if not any(is_without(each) for each in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        first = args[0] if name.startswith("_foreach_") else args
        for target in tensors_in(first):
            self._becomes(target, NOWHERE)
        return None

    # -- results --------------------------------------------------------------------------------------------

    def answered(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        has_gradient: bool = True,
    ) -> Any:
        """Return the result of a function as fake tensors that know their gradient sources."""
        try:
            key: Any = (
                func,
                _key(args),
                _key(tuple(kwargs.items())) if kwargs else (),
                _casts() if autocasts() else None,
            )
            known = self._known.get(key)
        except TypeError:  # an unhashable argument
            key = known = None
        if known is None:
            known = self._asked(func, args, kwargs)
            if key is not None:
                self._known[key] = known
        leaves, spec, single = known
        sources = NOWHERE
        if has_gradient and torch.is_grad_enabled():
            for arg in args if not kwargs else (*args, *kwargs.values()):
                found = arg.sources if type(arg) is ReplayTensor else self.gradient_sources.of(arg)
                if found is not sources:
                    sources = self.gradient_sources.union(sources, found)
        if single:
            return ReplayTensor(leaves[0], sources if sources and takes_gradient(leaves[0]) else NOWHERE)
        return pytree.tree_unflatten(
            [
                ReplayTensor(leaf, sources if takes_gradient(leaf) else NOWHERE)
                if type(leaf) is tuple and len(leaf) == 4
                else leaf[0]
                for leaf in leaves
            ],
            spec,
        )

    def _asked(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], Any, bool]:
        """Ask torch for the result of a function on such arguments."""
        if self._fake is None:
            from torch._subclasses.fake_tensor import FakeTensorMode

            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        random = torch.default_generator.get_state()
        try:
            with torch.no_grad(), self._fake:

                def faked(value: object) -> Any:
                    if not isinstance(value, torch.Tensor):
                        return value
                    size, stride, dtype, device = meta_of(value)
                    return torch.empty_strided(size, stride, dtype=dtype, device=device)

                inside = pytree.tree_map(faked, (args, kwargs))
                result = func(*inside[0], **inside[1])
                leaves, spec = pytree.tree_flatten(result)
                metas = [meta_of(leaf) if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        except Exception as error:
            if isinstance(error, (TypeError, ValueError, IndexError)) and not type(
                error
            ).__module__.startswith("torch"):
                raise  # the script's own error, or a check by exception
            why = " ".join(str(error).split())[:160]
            self.refuse(
                f"{name_of(func)}() of tensors computed in training cannot be replayed ({type(error).__name__}: {why})"
            )
        finally:
            torch.default_generator.set_state(random)
        return metas, spec, isinstance(result, torch.Tensor)

    def _not_followed(self, at: int) -> NoReturn:
        self.refuse("indexing with a mask cannot be replayed here")

    def _becomes(self, target: Tensor, sources: frozenset[Any]) -> None:
        """Replace a tensor that was written to by a fake tensor."""
        if type(target) is ReplayTensor:
            if sources:
                target.sources = self.gradient_sources.union(target.sources, sources)
        elif not target.requires_grad:  # weights keep their values; the resume point restores them
            if target.layout is torch.strided:
                self.memory.add(target.untyped_storage().data_ptr())
            self._swap(target, ReplayTensor(meta_of(target), sources))

    def _swap(self, target: Tensor, other: object) -> None:
        try:
            torch.utils.swap_tensors(target, other)
        except RuntimeError:  # weakly referenced: it stays real, and the resume point detects the change
            with torch.no_grad():
                target.detach().zero_()

    def _requires_grad(self, tensor: Tensor) -> bool:
        return bool(tensor.sources) if type(tensor) is ReplayTensor else tensor.requires_grad

    def _requires_grad_(self, tensor: Tensor, requires_grad: bool = True) -> Any:
        if type(tensor) is ReplayTensor:
            tensor.sources = frozenset((ById(tensor),)) if requires_grad else NOWHERE
            return tensor
        return tensor.requires_grad_(requires_grad)

    def _grad_fn(self, tensor: Tensor) -> Any:
        if type(tensor) is not ReplayTensor:
            return tensor.grad_fn
        return GradFn() if tensor.sources else None

    def _hook(self, tensor: Tensor, hook: object) -> Any:
        if type(tensor) is not ReplayTensor:
            return tensor.register_hook(hook)
        return Handle()

    def _backward(
        self,
        tensor: Tensor,
        gradient: Tensor = None,
        retain_graph: object = None,
        create_graph: bool = False,
        inputs: object = None,
    ) -> None:
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def _to(self, tensor: Tensor, *args: object, **kwargs: object) -> Any:
        func = (
            torch.Tensor.to
            if not (args and isinstance(args[0], str) and args[0].startswith("torch."))
            else torch.Tensor.type
        )
        found = self.answered(func, (tensor, *args), kwargs)
        if found.meta == (
            tensor.meta if type(tensor) is ReplayTensor else meta_of(tensor)
        ) and not kwargs.get("copy"):
            return tensor
        return found

    def _from_values(self, data: object, *args: object, **kwargs: object) -> Any:
        """Build a fake tensor: `torch.tensor` would read the list elements itself."""
        if isinstance(data, torch.Tensor):
            return self.answered(torch.as_tensor, (data, *args), kwargs)
        zeros = pytree.tree_map(
            lambda each: (
                torch.zeros(each.meta[0], dtype=each.meta[2]) if type(each) is ReplayTensor else each
            ),
            data,
        )
        return ReplayTensor(meta_of(torch.tensor(zeros, *args, **kwargs)))


def _any_place(index: object) -> Any:
    """Replace a 0-dim integer tensor index by 0: the shape does not depend on its value."""
    if isinstance(index, tuple):
        return tuple(map(_any_place, index))
    return (
        0 if isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_floating_point() else index
    )


def _casts() -> Any:
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )


def name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        inner = getattr(owner, "__name__", "")
        return f"get {inner}" if name == "__get__" else f"{inner}.{name}"
    return str(name or func)


def _key(values: tuple[Any, ...] | list[Any]) -> Any:
    """Return a key of the arguments that can affect a result's shape. Raises TypeError for unhashable
    ones.
    """
    parts: list[Any] = []
    for value in values:
        found = type(value)
        if found is ReplayTensor:
            parts.append(value.meta)
        elif found is int or found is str or value is None:
            parts.append(value)
        elif found is bool or found is float:  # 1, 1.0 and True are equal as keys
            parts.append((found, value))
        elif isinstance(value, torch.Tensor):
            parts.append(meta_of(value))
        elif found is tuple or found is list:
            parts.append((found, _key(value)))
        elif found is dict:
            parts.append((tuple(value), _key(tuple(value.values()))))
        elif found is slice:
            parts.append((slice, _key((value.start, value.stop, value.step))))
        else:
            hash(value)
            parts.append(value)
    return tuple(parts)
