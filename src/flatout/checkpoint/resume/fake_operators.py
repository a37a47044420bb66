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
from typing import Any

import torch

from flatout.agent.masks import has_mask
from flatout.checkpoint.resume.fake_results import FakeResults, Way, name_of
from flatout.checkpoint.resume.fake_tensors import (
    NOWHERE,
    ReplayTensor,
    is_without,
    meta_of,
    takes_gradient,
    tensors_in,
    trains,
)
from flatout.checkpoint.resume.operator_names import (
    GETTERS,
    IN_PLACE,
    NATIVE,
    PACKED,
    READS_VALUES,
    SHAPING,
    WITHOUT_GRADIENT,
)


class FakeOperators(FakeResults):
    """Answers functions of fake tensors.

    ``refuse`` gets a reason for what is unsupported, and does not return.
    """

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


def _any_place(index: object) -> Any:
    """Replace a 0-dim integer tensor index by 0: the shape does not depend on its value."""
    if isinstance(index, tuple):
        return tuple(map(_any_place, index))
    return (
        0 if isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_floating_point() else index
    )
