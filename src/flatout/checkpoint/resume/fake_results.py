"""Results of functions on fake tensors: shapes from torch's FakeTensorMode, and gradient sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from flatout.checkpoint.resume.fake_tensors import (
    NOWHERE,
    ReplayTensor,
    meta_of,
    takes_gradient,
)
from flatout.checkpoint.resume.gradient_sources import ById, GradFn, GradientSources, Handle

if TYPE_CHECKING:
    from torch import Tensor

Refuse = Callable[[str], NoReturn]
Way = Callable[[tuple[Any, ...], dict[str, Any]], Any]
autocasts = torch._C._is_any_autocast_enabled


class FakeResults:
    """Calculates results. ``refuse`` gets a reason for what is unsupported, and does not return."""

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
