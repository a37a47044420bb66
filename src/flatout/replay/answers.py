"""What functions of skeletons give, at once.

While a program is brought to a save again, a mode of torch sees each function that the program calls. A function of skeletons or of weights is asked once, by
torch's FakeTensorMode, what it gives for arguments like these, and from then on a table answers. What is written to becomes a skeleton itself, under the same
name everywhere: `torch.utils.swap_tensors` changes what a tensor is without changing who holds it. The same brings values back at the seam.
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
from flatout.replay.lineage import ById, GradFn, Handle, Lineage
from flatout.replay.skeleton import NOWHERE, Skeleton, is_without, meta_of, takes_gradient, tensors_in, trains, whole

Refuse = Callable[[str], NoReturn]
Way = Callable[[tuple, dict[str, Any]], Any]
autocasts = torch._C._is_any_autocast_enabled

COLLECTIVE = "a collective"
# Answered by the skeleton itself, or by torch for it: nothing of values.
NATIVE = frozenset((
    COLLECTIVE,  # the process group answers (`flatout.replay.collectives`)
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device",
    "__len__", "__hash__", "storage_offset", "is_same_size", "is_pinned", "is_inference", "is_conj", "is_neg", "is_set_to", "dim_order", "is_distributed",
    "_is_view", "is_nonzero_static", "has_names", "__dir__", "is_coalesced", "is_tensor", "is_storage", "_is_zerotensor", "_has_compatible_shallow_copy_type"))
GETTERS = frozenset(("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps", "is_xpu", "itemsize",
                     "nbytes", "names", "grad", "_version", "output_nr", "is_mkldnn", "is_sparse_csr", "is_nested", "is_vulkan", "is_xla", "is_hpu",
                     "is_ipu", "is_maia", "is_mtia", "name", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "is_inference"))
WITHOUT_GRADIENT = frozenset(("detach", "detach_", "data", "argmax", "argmin", "argsort", "eq", "ne", "lt", "gt", "le", "ge"))
READS_VALUES = frozenset(("data_ptr", "storage", "untyped_storage", "_typed_storage", "__array_interface__", "__cuda_array_interface__", "__dlpack__",
                          "share_memory_", "__reduce_ex__", "__deepcopy__"))
IN_PLACE = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__",
                      "__ixor__", "__ilshift__", "__irshift__"))
PACKED = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
SHAPING = frozenset(("squeeze_", "unsqueeze_", "transpose_", "t_", "resize_", "resize_as_", "as_strided_", "swapaxes_", "swapdims_"))


class Skeletons:
    """The functions of skeletons. ``refuse`` is called with a sentence for what cannot be answered, and does not return."""

    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse
        self.shaped_again: Callable[[int], Any] = self._not_followed  # set by who knows: what a mask as an index has found at a place in the code
        self.taken: Callable[[Any, FrameType], None] = lambda rows, caller: None  # set by who counts what is taken by an order
        self.memory: set[int] = set()  # where real tensors lay that were written to: others may lie there, too
        self._known: dict[Any, Any] = {}
        self._ways: dict[Any, Way] = {}
        self._fake: Any = None
        self.lineage = Lineage()
        self._special: dict[str, Callable[..., Any]] = {
            "backward": self._backward, "requires_grad": self._requires_grad, "grad_fn": self._grad_fn, "retain_grad": lambda tensor: None,
            "requires_grad_": self._requires_grad_, "to": self._to, "type": self._to, "__iter__": lambda tensor: iter(tensor.unbind(0)),
            "pin_memory": lambda tensor, device=None: Skeleton(meta_of(tensor)),  # a fake tensor refuses it
            "register_hook": self._hook, "tensor": self._from_values, "as_tensor": self._from_values,
            "is_leaf": lambda tensor: tensor.is_leaf if type(tensor) is not Skeleton else not tensor.sources}

    def mode(self) -> Any:
        """The mode that sees each function of torch that is called."""
        ways, way_of = self._ways, self._way_of

        class Answering(torch.overrides.TorchFunctionMode):
            off = False

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if not self.off:
                    for arg in args:
                        if type(arg) is Skeleton or trains(arg):
                            return (ways.get(func) or way_of(func))(args, kwargs or {})
                    if kwargs and any(map(trains, kwargs.values())):
                        return (ways.get(func) or way_of(func))(args, kwargs)
                return func(*args, **(kwargs or {}))

        return Answering()

    # -- one function -------------------------------------------------------------------------------------------------------

    def _way_of(self, func: Any) -> Way:
        """How calls of a function are answered, from here on."""
        way = self._ways[func] = self._found_way(func, _name_of(func))
        return way

    def _found_way(self, func: Any, name: str) -> Way:
        special = self._special.get(name.removeprefix("get "))
        if name == "data.__set__":
            return self._data_set
        if name in NATIVE or name.endswith(("__set__", "__delete__")) or (name.startswith("get ") and name[4:] in GETTERS):
            return lambda args, kwargs: func(*args, **kwargs)
        if special is not None:
            return (lambda args, kwargs: special(args[0])) if name.startswith("get ") else (lambda args, kwargs: special(*args, **kwargs))
        if name == "get data":
            return lambda args, kwargs: Skeleton(meta_of(args[0]))
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
        if name.startswith("get "):  # it is called with the tensor, and with its class
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
        found = self.shaped_again(sys._getframe(2).f_lasti)  # of who has called: the mode is between
        found.sources = self.lineage.of(list(args)) if torch.is_grad_enabled() and takes_gradient(found.meta) else NOWHERE
        return found

    def _of_packed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A recurrent network. Of packed sequences it gives an output a row, and hidden states like those that it was given."""
        if not (isinstance(args[1], torch.Tensor) and args[1].dtype is torch.int64):
            return self.answered(func, args, kwargs)
        packed, _, hidden, *_, both_ways = args
        hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        width = hidden[0].shape[-1] * (2 if both_ways else 1)
        found = (whole((packed.shape[0], width), packed.dtype, packed.device), *(Skeleton(meta_of(each)) for each in hidden))
        return self.lineage.comes_from(found, args)

    def _padded(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Packed sequences, as rows of one length again."""
        packed, sizes, batch_first, _, longest = args
        counts = torch._C.TensorBase.tolist(sizes)  # they are there; nobody is to hear of it
        rows, steps = counts[0], max(len(counts), longest)
        size = (*((rows, steps) if batch_first else (steps, rows)), *packed.shape[1:])
        found = whole(size, packed.dtype, packed.device)
        lengths = torch.tensor([sum(count > row for count in counts) for row in range(rows)], device="cpu")
        return self.lineage.comes_from(found, (packed,)), lengths

    def _data_set(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Weights keep what they have, in the shape that they get."""
        target, value = args
        if type(value) is Skeleton or trains(value):
            if target.requires_grad and type(target) is not Skeleton:
                if target.shape != value.shape or target.dtype != value.dtype:
                    size, stride, dtype, device = meta_of(value)
                    target.data = torch.empty_strided(size, stride, dtype=dtype, device=device)
            else:
                self._swap(target, Skeleton(meta_of(value), self.lineage.of(target)))
        elif type(target) is Skeleton:
            self._swap(target, Skeleton(meta_of(value), target.sources))
        else:
            target.data = value

    def _values_read(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name == "__deepcopy__":  # beside what was copied already
            return Skeleton(args[0].meta) if type(args[0]) is Skeleton else func(*args)
        if any(is_without(arg) for arg in args):
            self.refuse(f"the program uses {name} of a tensor that its training computed, which cannot be followed")
        return func(*args, **kwargs)

    def answered(self, func: Any, args: tuple, kwargs: dict[str, Any], has_gradient: bool = True) -> Any:
        """What a function gives for arguments like these, as skeletons that know where they come from."""
        try:
            key: Any = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else (), _casts() if autocasts() else None)
            known = self._known.get(key)
        except TypeError:  # an argument that is no key
            key = known = None
        if known is None:
            known = self._asked(func, args, kwargs)
            if key is not None:
                self._known[key] = known
        leaves, spec, single = known
        sources = NOWHERE
        if has_gradient and torch.is_grad_enabled():
            for arg in args if not kwargs else (*args, *kwargs.values()):
                found = arg.sources if type(arg) is Skeleton else self.lineage.of(arg)
                if found is not sources:
                    sources = self.lineage.union(sources, found)
        if single:
            return Skeleton(leaves[0], sources if sources and takes_gradient(leaves[0]) else NOWHERE)
        return pytree.tree_unflatten([Skeleton(leaf, sources if takes_gradient(leaf) else NOWHERE) if type(leaf) is tuple and len(leaf) == 4 else leaf[0]
                                      for leaf in leaves], spec)

    def _asked(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Any, bool]:
        """What torch says a function gives for arguments like these."""
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
            if isinstance(error, (TypeError, ValueError, IndexError)) and not type(error).__module__.startswith("torch"):
                raise  # the program's own mistake, or its way of asking
            why = " ".join(str(error).split())[:160]
            self.refuse(f"{_name_of(func)}() of tensors that the training computed cannot be followed ({type(error).__name__}: {why})")
        finally:
            torch.default_generator.set_state(random)
        return metas, spec, isinstance(result, torch.Tensor)

    def _not_followed(self, at: int) -> NoReturn:
        self.refuse("what a mask has found cannot be followed")

    # -- writing ------------------------------------------------------------------------------------------------------------

    def _in_place(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What it writes to it gives back."""
        found = kwargs.get("out")
        if found is None:
            found = args[0] if args else next(iter(tensors_in([*kwargs.values()])))
        return self._written(name, func, [found] if isinstance(found, torch.Tensor) else found, args, kwargs, found)

    def _written(self, name: str, func: Any, targets: Iterable[Any], args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        targets = list(targets)
        others = [each for each in (*args, *kwargs.values()) if not any(each is target for target in targets)]
        drawn = any(is_without(each) for each in others)
        if not drawn and not any(type(target) is Skeleton for target in targets):
            return func(*args, **kwargs)  # nothing that was computed is in it: weights that are made, say
        sources = NOWHERE
        if torch.is_grad_enabled() and name not in ("detach_", "zero_", "fill_"):
            for each in others:
                sources = self.lineage.union(sources, self.lineage.of(each))
        for target in targets:
            self._becomes(target, sources)
        if name in SHAPING and isinstance(result, Skeleton):
            metas, _, _ = self._asked(func, args, kwargs)
            self._swap(result, Skeleton(metas[0], result.sources))
        return result

    def _many(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function of lists of tensors; it writes to all lists that it may where its name ends so."""
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
        """What somebody else has written to."""
        for target in targets:
            if isinstance(target, torch.Tensor):
                self._becomes(target, NOWHERE)

    def _becomes(self, target: Any, sources: frozenset[Any]) -> None:
        """A tensor was written to with what nobody knows."""
        if type(target) is Skeleton:
            if sources:
                target.sources = self.lineage.union(target.sources, sources)
        elif not target.requires_grad:  # weights keep what they have; the seam brings what they should have
            if target.layout is torch.strided:
                self.memory.add(target.untyped_storage().data_ptr())
            self._swap(target, Skeleton(meta_of(target), sources))

    def _swap(self, target: Any, other: Any) -> None:
        try:
            torch.utils.swap_tensors(target, other)
        except RuntimeError:  # something knows it weakly: it is as real as it was, and the seam sees that it has changed
            with torch.no_grad():
                target.detach().zero_()

    # -- gradients ----------------------------------------------------------------------------------------------------------

    def _requires_grad(self, tensor: Any) -> bool:
        return bool(tensor.sources) if type(tensor) is Skeleton else tensor.requires_grad

    def _requires_grad_(self, tensor: Any, requires_grad: bool = True) -> Any:
        if type(tensor) is Skeleton:
            tensor.sources = frozenset((ById(tensor),)) if requires_grad else NOWHERE
            return tensor
        return tensor.requires_grad_(requires_grad)

    def _grad_fn(self, tensor: Any) -> Any:
        if type(tensor) is not Skeleton:
            return tensor.grad_fn
        return GradFn() if tensor.sources else None

    def _hook(self, tensor: Any, hook: Any) -> Any:
        if type(tensor) is not Skeleton:
            return tensor.register_hook(hook)
        return Handle()

    def _backward(self, tensor: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None) -> None:
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    # -- others -------------------------------------------------------------------------------------------------------------

    def _to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        func = torch.Tensor.to if not (args and isinstance(args[0], str) and args[0].startswith("torch.")) else torch.Tensor.type
        found = self.answered(func, (tensor, *args), kwargs)
        if found.meta == (tensor.meta if type(tensor) is Skeleton else meta_of(tensor)) and not kwargs.get("copy"):
            return tensor
        return found


    def _from_values(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.tensor` looks into lists by itself."""
        if isinstance(data, torch.Tensor):
            return self.answered(torch.as_tensor, (data, *args), kwargs)
        zeros = pytree.tree_map(lambda each: torch.zeros(each.meta[0], dtype=each.meta[2]) if type(each) is Skeleton else each, data)
        return Skeleton(meta_of(torch.tensor(zeros, *args, **kwargs)))


def _has_order(index: Any) -> bool:
    """Whether somebody takes rows by a list of their numbers."""
    return any(isinstance(each, list) or getattr(each, "ndim", 0) > 0 for each in (index if isinstance(index, tuple) else (index,)))


def _any_place(index: Any) -> Any:
    """A number in a tensor chooses one place: which one is nothing to the shape."""
    if isinstance(index, tuple):
        return tuple(map(_any_place, index))
    return 0 if isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_floating_point() else index


def _casts() -> Any:
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


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
    """Of arguments: what a result's shape may depend on. Raises TypeError where something in them is no key."""
    parts: list[Any] = []
    for value in values:
        found = type(value)
        if found is Skeleton:
            parts.append(value.meta)
        elif found is int or found is str or value is None:
            parts.append(value)
        elif found is bool or found is float:  # 1, 1.0 and True are one key
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
