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
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from flatout.capture.masks import has_mask
from flatout.replay.fake_tensors import (
    NOWHERE,
    ReplayTensor,
    is_without,
    meta_of,
    takes_gradient,
    tensors_in,
    trains,
    whole,
)
from flatout.replay.gradient_sources import ById, GradFn, GradientSources, Handle

Refuse = Callable[[str], NoReturn]
Way = Callable[[tuple, dict[str, Any]], Any]
autocasts = torch._C._is_any_autocast_enabled

COLLECTIVE = "a collective"
# The fake tensor itself, or torch for it, answers these: they need no values.
NATIVE = frozenset(
    (
        COLLECTIVE,  # answered by the process group (`flatout.replay.collectives`)
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "__len__",
        "__hash__",
        "storage_offset",
        "is_same_size",
        "is_pinned",
        "is_inference",
        "is_conj",
        "is_neg",
        "is_set_to",
        "dim_order",
        "is_distributed",
        "_is_view",
        "is_nonzero_static",
        "has_names",
        "__dir__",
        "is_coalesced",
        "is_tensor",
        "is_storage",
        "_is_zerotensor",
        "_has_compatible_shallow_copy_type",
    )
)
GETTERS = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_mps",
        "is_xpu",
        "itemsize",
        "nbytes",
        "names",
        "grad",
        "_version",
        "output_nr",
        "is_mkldnn",
        "is_sparse_csr",
        "is_nested",
        "is_vulkan",
        "is_xla",
        "is_hpu",
        "is_ipu",
        "is_maia",
        "is_mtia",
        "name",
        "retains_grad",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "is_inference",
    )
)
WITHOUT_GRADIENT = frozenset(
    ("detach", "detach_", "data", "argmax", "argmin", "argsort", "eq", "ne", "lt", "gt", "le", "ge")
)
READS_VALUES = frozenset(
    (
        "data_ptr",
        "storage",
        "untyped_storage",
        "_typed_storage",
        "__array_interface__",
        "__cuda_array_interface__",
        "__dlpack__",
        "share_memory_",
        "__reduce_ex__",
        "__deepcopy__",
    )
)
IN_PLACE = frozenset(
    (
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__idiv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
    )
)
PACKED = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
SHAPING = frozenset(
    (
        "squeeze_",
        "unsqueeze_",
        "transpose_",
        "t_",
        "resize_",
        "resize_as_",
        "as_strided_",
        "swapaxes_",
        "swapdims_",
    )
)


class FakeOperators:
    """Answers functions of fake tensors.

    ``refuse`` gets a reason for what is unsupported, and does not return.
    """

    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse
        # set from outside: the recorded result of mask indexing at a place in the code
        self.shaped_again: Callable[[int], Any] = self._not_followed
        # set from outside: counts the rows selected by an order
        self.taken: Callable[[Any, FrameType], None] = lambda rows, caller: None
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

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if not self.off:
                    for arg in args:
                        if type(arg) is ReplayTensor or trains(arg):
                            return (ways.get(func) or way_of(func))(args, kwargs or {})
                    if kwargs and any(map(trains, kwargs.values())):
                        return (ways.get(func) or way_of(func))(args, kwargs)
                return func(*args, **(kwargs or {}))

        return Answering()

    # -- answering a function -------------------------------------------------------------------------------

    def _way_of(self, func: Any) -> Way:
        """Return how calls of a function are answered from here on."""
        way = self._ways[func] = self._found_way(func, _name_of(func))
        return way

    def _found_way(self, func: Any, name: str) -> Way:
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
        if name == "_pad_packed_sequence":
            return self._padded
        if name in PACKED:
            return partial(self._of_packed, func)
        if name == "__setitem__":
            return lambda args, kwargs: self._written(name, func, [args[0]], args, kwargs, None)
        if name.startswith("get "):  # called with the tensor and its class
            return lambda args, kwargs: self.answered(func, args[:1], {}, name[4:] not in WITHOUT_GRADIENT)
        if name.startswith(("_foreach_", "_fused_", "_amp_")):
            return partial(self._many, name, func)
        if (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE:
            return partial(self._in_place, name, func)
        answered, has_gradient = self.answered, name not in WITHOUT_GRADIENT

        def way(args: tuple, kwargs: dict[str, Any]) -> Any:
            if kwargs and kwargs.get("out") is not None:
                return self._in_place(name, func, args, kwargs)
            return answered(func, args, kwargs, has_gradient)

        return way

    def _indexed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not has_mask(args[1]):
            if _has_order(args[1]):
                self.taken(None, sys._getframe(2))
            return self.answered(func, (args[0], _any_place(args[1])), kwargs)
        found = self.shaped_again(sys._getframe(2).f_lasti)  # of the caller: the mode is in between
        found.sources = (
            self.gradient_sources.of(list(args))
            if torch.is_grad_enabled() and takes_gradient(found.meta)
            else NOWHERE
        )
        return found

    def _of_packed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Answer a recurrent network.

        For packed sequences it returns one output per row, and hidden states like its inputs.
        """
        if not (isinstance(args[1], torch.Tensor) and args[1].dtype is torch.int64):
            return self.answered(func, args, kwargs)
        packed, _, hidden, *_, both_ways = args
        hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        width = hidden[0].shape[-1] * (2 if both_ways else 1)
        found = (
            whole((packed.shape[0], width), packed.dtype, packed.device),
            *(ReplayTensor(meta_of(each)) for each in hidden),
        )
        return self.gradient_sources.comes_from(found, args)

    def _padded(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Pad packed sequences to equal length."""
        packed, sizes, batch_first, _, longest = args
        counts = torch._C.TensorBase.tolist(sizes)  # real values; do not record this
        rows, steps = counts[0], max(len(counts), longest)
        size = (*((rows, steps) if batch_first else (steps, rows)), *packed.shape[1:])
        found = whole(size, packed.dtype, packed.device)
        lengths = torch.tensor([sum(count > row for count in counts) for row in range(rows)], device="cpu")
        return self.gradient_sources.comes_from(found, (packed,)), lengths

    def _data_set(self, args: tuple, kwargs: dict[str, Any]) -> None:
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

    def _values_read(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name == "__deepcopy__":  # with the memo of copies
            return ReplayTensor(args[0].meta) if type(args[0]) is ReplayTensor else func(*args)
        if any(is_without(arg) for arg in args):
            self.refuse(f"{name} of a tensor computed in training cannot be replayed")
        return func(*args, **kwargs)

    def answered(self, func: Any, args: tuple, kwargs: dict[str, Any], has_gradient: bool = True) -> Any:
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

    def _asked(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Any, bool]:
        """Ask torch for the result of a function on such arguments."""
        if self._fake is None:
            from torch._subclasses.fake_tensor import FakeTensorMode

            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        random = torch.default_generator.get_state()
        try:
            with torch.no_grad(), self._fake:

                def faked(value: Any) -> Any:
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
                f"{_name_of(func)}() of tensors computed in training cannot be replayed ({type(error).__name__}: {why})"
            )
        finally:
            torch.default_generator.set_state(random)
        return metas, spec, isinstance(result, torch.Tensor)

    def _not_followed(self, at: int) -> NoReturn:
        self.refuse("indexing with a mask cannot be replayed here")

    # -- in-place functions ---------------------------------------------------------------------------------

    def _in_place(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Answer an in-place function: it returns the tensor it writes to."""
        found = kwargs.get("out")
        if found is None:
            found = args[0] if args else next(iter(tensors_in([*kwargs.values()])))
        return self._written(
            name, func, [found] if isinstance(found, torch.Tensor) else found, args, kwargs, found
        )

    def _written(
        self, name: str, func: Any, targets: Iterable[Any], args: tuple, kwargs: dict[str, Any], result: Any
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

    def _many(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
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

    def lose(self, targets: Iterable[Any]) -> None:
        """Mark tensors that other code has overwritten as unknown."""
        for target in targets:
            if isinstance(target, torch.Tensor):
                self._becomes(target, NOWHERE)

    def _becomes(self, target: Any, sources: frozenset[Any]) -> None:
        """Replace a tensor that was written to by a fake tensor."""
        if type(target) is ReplayTensor:
            if sources:
                target.sources = self.gradient_sources.union(target.sources, sources)
        elif not target.requires_grad:  # weights keep their values; the resume point restores them
            if target.layout is torch.strided:
                self.memory.add(target.untyped_storage().data_ptr())
            self._swap(target, ReplayTensor(meta_of(target), sources))

    def _swap(self, target: Any, other: Any) -> None:
        try:
            torch.utils.swap_tensors(target, other)
        except RuntimeError:  # weakly referenced: it stays real, and the resume point detects the change
            with torch.no_grad():
                target.detach().zero_()

    # -- gradients ------------------------------------------------------------------------------------------

    def _requires_grad(self, tensor: Any) -> bool:
        return bool(tensor.sources) if type(tensor) is ReplayTensor else tensor.requires_grad

    def _requires_grad_(self, tensor: Any, requires_grad: bool = True) -> Any:
        if type(tensor) is ReplayTensor:
            tensor.sources = frozenset((ById(tensor),)) if requires_grad else NOWHERE
            return tensor
        return tensor.requires_grad_(requires_grad)

    def _grad_fn(self, tensor: Any) -> Any:
        if type(tensor) is not ReplayTensor:
            return tensor.grad_fn
        return GradFn() if tensor.sources else None

    def _hook(self, tensor: Any, hook: Any) -> Any:
        if type(tensor) is not ReplayTensor:
            return tensor.register_hook(hook)
        return Handle()

    def _backward(
        self,
        tensor: Any,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    # -- other functions ------------------------------------------------------------------------------------

    def _to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
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

    def _from_values(self, data: Any, *args: Any, **kwargs: Any) -> Any:
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


def _has_order(index: Any) -> bool:
    """Whether an index selects rows by a list of their numbers."""
    return any(
        isinstance(each, list) or getattr(each, "ndim", 0) > 0
        for each in (index if isinstance(index, tuple) else (index,))
    )


def _any_place(index: Any) -> Any:
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


def _name_of(func: Any) -> str:
    if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
        return COLLECTIVE
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        inner = getattr(owner, "__name__", "")
        return f"get {inner}" if name == "__get__" else f"{inner}.{name}"
    return str(name or func)


def _key(values: tuple | list) -> Any:
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
