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

from flatout.agent.synchronisations import has_mask
from flatout.checkpoint.resume.gradient_sources import (
    NO_SOURCES,
    ById,
    GradFn,
    GradientSources,
    Handle,
    ReplayTensor,
    TensorSpec,
    has_fake,
    is_trained,
    spec_of,
    takes_gradient,
    tensors_in,
)

if TYPE_CHECKING:
    from torch import Tensor

# Names of torch functions, by how they are answered during a replay.
# fmt: off
# the fake tensor itself, or torch for it, answers these: they need no values
NATIVE = {
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "get_device", "__len__", "__hash__", "storage_offset",
    "is_same_size", "is_pinned", "is_inference", "is_conj", "is_neg", "is_set_to", "dim_order",
    "is_distributed", "_is_view", "is_nonzero_static", "has_names", "__dir__", "is_coalesced",
    "is_tensor", "is_storage", "_is_zerotensor", "_has_compatible_shallow_copy_type",
}
GETTERS = {
    "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "is_quantized", "is_mps", "is_xpu", "itemsize", "nbytes", "names", "grad", "_version", "output_nr",
    "is_mkldnn", "is_sparse_csr", "is_nested", "is_vulkan", "is_xla", "is_hpu", "is_ipu", "is_maia",
    "is_mtia", "name", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "is_inference",
}
WITHOUT_GRADIENT = {
    "detach", "detach_", "data", "argmax", "argmin", "argsort", "eq", "ne", "lt", "gt", "le", "ge",
}
READS_VALUES = {
    "data_ptr", "storage", "untyped_storage", "_typed_storage", "__array_interface__",
    "__cuda_array_interface__", "__dlpack__", "share_memory_", "__reduce_ex__", "__deepcopy__",
}
IN_PLACE = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}
# functions that may get a packed sequence
PACKED = {"lstm", "gru", "rnn_tanh", "rnn_relu", "_pack_padded_sequence", "_pad_packed_sequence"}
RESHAPING_IN_PLACE = {
    "squeeze_", "unsqueeze_", "transpose_", "t_", "resize_", "resize_as_", "as_strided_", "swapaxes_",
    "swapdims_",
}
# fmt: on

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Refuse = Callable[[str], NoReturn]
Answer = Callable[[Args, Kwargs], Any]
is_autocasting = torch._C._is_any_autocast_enabled


class FakeOperators:
    """Answers functions of fake tensors.

    ``refuse`` gets a reason for what is unsupported, and does not return."""

    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse
        # set from outside: place in the code -> the recorded result of indexing with a mask
        self.make_recorded_result: Callable[[int], Any] = lambda place_id: refuse(
            "indexing with a mask cannot be replayed here"
        )
        # memory of real tensors that were written to; other tensors may share it
        self.written_storages: set[int] = set()
        self._results: dict[Any, Any] = {}
        self._answers: dict[Any, Answer] = {}
        self._fake: Any = None
        self.gradient_sources = GradientSources()
        self._special_cases: dict[str, Function] = {
            "backward": self._backward,
            "requires_grad": self._requires_grad,
            "grad_fn": self._grad_fn,
            "retain_grad": lambda tensor: None,
            "requires_grad_": self._requires_grad_,
            "to": self._to,
            "type": self._to,
            "__iter__": lambda tensor: iter(tensor.unbind(0)),
            # unsupported by torch's FakeTensor
            "pin_memory": lambda tensor, device=None: ReplayTensor(spec_of(tensor)),
            "register_hook": self._hook,
            "tensor": self._from_values,
            "as_tensor": self._from_values,
            "is_leaf": lambda tensor: (
                tensor.is_leaf if type(tensor) is not ReplayTensor else not tensor.sources
            ),
        }

    def mode(self) -> Any:
        """Return the mode that intercepts each torch function."""
        answers, answer_of = self._answers, self._answer_of

        class AnsweringMode(torch.overrides.TorchFunctionMode):
            disabled = False

            def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
                if not self.disabled:
                    for arg in args:
                        if type(arg) is ReplayTensor or is_trained(arg):
                            return (answers.get(func) or answer_of(func))(args, kwargs or {})
                    if kwargs and any(map(is_trained, kwargs.values())):
                        return (answers.get(func) or answer_of(func))(args, kwargs)
                return func(*args, **(kwargs or {}))

        return AnsweringMode()

    # -- answering a function

    def _answer_of(self, func: Function) -> Answer:
        answer = self._answers[func] = self._choose_answer(func, name_of(func))
        return answer

    def _choose_answer(self, func: Function, name: str) -> Answer:
        special_case = self._special_cases.get(name.removeprefix("get "))
        if name == "data.__set__":
            return self._set_data
        if (
            name in NATIVE
            or name.endswith(("__set__", "__delete__"))
            or (name.startswith("get ") and name[4:] in GETTERS)
        ):
            return lambda args, kwargs: func(*args, **kwargs)
        if special_case is not None and name.startswith("get "):
            return lambda args, kwargs: special_case(args[0])
        if special_case is not None:
            return lambda args, kwargs: special_case(*args, **kwargs)
        if name == "get data":
            return lambda args, kwargs: ReplayTensor(spec_of(args[0]))
        if name.removeprefix("get ") in READS_VALUES:
            return partial(self._read_values, name.removeprefix("get "), func)
        if name == "__getitem__":
            return partial(self._index, func)
        if name in PACKED:
            return partial(self._reject_packed, name, func)
        if name == "__setitem__":
            return lambda args, kwargs: self._write(name, func, [args[0]], args, kwargs, None)
        if name.startswith("get "):  # called with the tensor and its class
            return lambda args, kwargs: self.answer(func, args[:1], {}, name[4:] not in WITHOUT_GRADIENT)
        if name.startswith(("_foreach_", "_fused_", "_amp_")):
            return partial(self._foreach, name, func)
        if (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE:
            return partial(self._in_place, name, func)
        answer, has_gradient = self.answer, name not in WITHOUT_GRADIENT

        def call(args: Args, kwargs: Kwargs) -> Any:
            if kwargs and kwargs.get("out") is not None:
                return self._in_place(name, func, args, kwargs)
            return answer(func, args, kwargs, has_gradient)

        return call

    def _index(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if not has_mask(args[1]):
            return self.answer(func, (args[0], _zero_scalar_indices(args[1])), kwargs)
        result = self.make_recorded_result(sys._getframe(2).f_lasti)  # of the caller: the mode is in between
        takes = torch.is_grad_enabled() and takes_gradient(result.spec)
        result.sources = self.gradient_sources.of(list(args)) if takes else NO_SOURCES
        return result

    def _reject_packed(self, name: str, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if name.endswith("_sequence") or (isinstance(args[1], torch.Tensor) and args[1].dtype is torch.int64):
            self.refuse("packed sequences (pack_padded_sequence) cannot be replayed")
        return self.answer(func, args, kwargs)

    def _set_data(self, args: Args, kwargs: Kwargs) -> None:
        target, value = args
        if type(value) is ReplayTensor or is_trained(value):
            if target.requires_grad and type(target) is not ReplayTensor:
                if target.shape != value.shape or target.dtype != value.dtype:
                    size, stride, dtype, device = spec_of(value)
                    target.data = torch.empty_strided(size, stride, dtype=dtype, device=device)
            else:
                self._swap(target, ReplayTensor(spec_of(value), self.gradient_sources.of(target)))
        elif type(target) is ReplayTensor:
            self._swap(target, ReplayTensor(spec_of(value), target.sources))
        else:
            target.data = value

    def _read_values(self, name: str, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if name == "__deepcopy__":  # with the memo of copies
            return ReplayTensor(args[0].spec) if type(args[0]) is ReplayTensor else func(*args)
        if any(has_fake(arg) for arg in args):
            self.refuse(f"{name} of a tensor computed in training cannot be replayed")
        return func(*args, **kwargs)

    # -- in-place functions

    def _in_place(self, name: str, func: Function, args: Args, kwargs: Kwargs) -> Any:
        target = kwargs.get("out")
        if target is None:
            target = args[0] if args else next(iter(tensors_in([*kwargs.values()])))
        return self._write(
            name, func, [target] if isinstance(target, torch.Tensor) else target, args, kwargs, target
        )

    def _write(
        self, name: str, func: Function, targets: Iterable[Any], args: Args, kwargs: Kwargs, result: object
    ) -> Any:
        targets = list(targets)
        sources_of = [
            argument
            for argument in (*args, *kwargs.values())
            if not any(argument is target for target in targets)
        ]
        uses_fake = any(has_fake(argument) for argument in sources_of)
        if not uses_fake and not any(type(target) is ReplayTensor for target in targets):
            return func(*args, **kwargs)  # no computed tensors, e.g. weight initialisation
        sources = NO_SOURCES
        if torch.is_grad_enabled() and name not in ("detach_", "zero_", "fill_"):
            for argument in sources_of:
                sources = self.gradient_sources.union(sources, self.gradient_sources.of(argument))
        for target in targets:
            self._make_fake(target, sources)
        if name in RESHAPING_IN_PLACE and isinstance(result, ReplayTensor):
            specs, _, _ = self._infer(func, args, kwargs)
            self._swap(result, ReplayTensor(specs[0], result.sources))
        return result

    def _foreach(self, name: str, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if kwargs.get("out") is not None:
            return self._in_place(name, func, args, kwargs)
        if not name.endswith("_"):
            return self.answer(func, args, kwargs)
        if not any(has_fake(argument) for argument in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        written = args[0] if name.startswith("_foreach_") else args
        for target in tensors_in(written):
            self._make_fake(target, NO_SOURCES)
        return None

    # -- results

    def answer(self, func: Function, args: Args, kwargs: Kwargs, has_gradient: bool = True) -> Any:
        """Return the result of a function as fake tensors that know their gradient sources."""
        try:
            key: Any = (
                func,
                _key(args),
                _key(tuple(kwargs.items())) if kwargs else (),
                _autocast_key() if is_autocasting() else None,
            )
            result = self._results.get(key)
        except TypeError:  # an unhashable argument
            key = result = None
        if result is None:
            result = self._infer(func, args, kwargs)
            if key is not None:
                self._results[key] = result
        leaves, tree_spec, single = result
        sources = NO_SOURCES
        if has_gradient and torch.is_grad_enabled():
            for arg in args if not kwargs else (*args, *kwargs.values()):
                arg_sources = arg.sources if type(arg) is ReplayTensor else self.gradient_sources.of(arg)
                if arg_sources is not sources:
                    sources = self.gradient_sources.union(sources, arg_sources)
        if single:
            return ReplayTensor(leaves[0], sources if sources and takes_gradient(leaves[0]) else NO_SOURCES)
        return pytree.tree_unflatten(
            [
                ReplayTensor(leaf, sources if takes_gradient(leaf) else NO_SOURCES)
                if type(leaf) is TensorSpec
                else leaf[0]
                for leaf in leaves
            ],
            tree_spec,
        )

    def _infer(self, func: Function, args: Args, kwargs: Kwargs) -> tuple[list[Any], Any, bool]:
        if self._fake is None:
            from torch._subclasses.fake_tensor import FakeTensorMode

            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        random_state = torch.default_generator.get_state()
        try:
            with torch.no_grad(), self._fake:

                def fake(value: object) -> Any:
                    if not isinstance(value, torch.Tensor):
                        return value
                    size, stride, dtype, device = spec_of(value)
                    return torch.empty_strided(size, stride, dtype=dtype, device=device)

                fake_inputs = pytree.tree_map(fake, (args, kwargs))
                result = func(*fake_inputs[0], **fake_inputs[1])
                leaves, tree_spec = pytree.tree_flatten(result)
                specs = [spec_of(leaf) if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
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
            torch.default_generator.set_state(random_state)
        return specs, tree_spec, isinstance(result, torch.Tensor)

    def _make_fake(self, target: Tensor, sources: frozenset[Any]) -> None:
        if type(target) is ReplayTensor:
            if sources:
                target.sources = self.gradient_sources.union(target.sources, sources)
        elif not target.requires_grad:  # weights keep their values; the resume point restores them
            if target.layout is torch.strided:
                self.written_storages.add(target.untyped_storage().data_ptr())
            self._swap(target, ReplayTensor(spec_of(target), sources))

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
            tensor.sources = frozenset((ById(tensor),)) if requires_grad else NO_SOURCES
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
        names_type = args and isinstance(args[0], str) and args[0].startswith("torch.")
        func = torch.Tensor.type if names_type else torch.Tensor.to
        result = self.answer(func, (tensor, *args), kwargs)
        spec = tensor.spec if type(tensor) is ReplayTensor else spec_of(tensor)
        return tensor if result.spec == spec and not kwargs.get("copy") else result

    def _from_values(self, data: object, *args: object, **kwargs: object) -> Any:
        """Build a fake tensor: `torch.tensor` would read the list elements itself."""
        if isinstance(data, torch.Tensor):
            return self.answer(torch.as_tensor, (data, *args), kwargs)
        zeros = pytree.tree_map(
            lambda item: (
                torch.zeros(item.spec.size, dtype=item.spec.dtype) if type(item) is ReplayTensor else item
            ),
            data,
        )
        return ReplayTensor(spec_of(torch.tensor(zeros, *args, **kwargs)))


def _zero_scalar_indices(index: object) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_zero_scalar_indices, index))
    return (
        0 if isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_floating_point() else index
    )


def _autocast_key() -> Any:
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )


def name_of(func: Function) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        inner = getattr(owner, "__name__", "")
        return f"get {inner}" if name == "__get__" else f"{inner}.{name}"
    return str(name or func)


def _key(values: tuple[Any, ...] | list[Any]) -> Any:
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is ReplayTensor:
            parts.append(value.spec)
        elif kind is int or kind is str or value is None:
            parts.append(value)
        elif kind is bool or kind is float:  # 1, 1.0 and True are equal as keys
            parts.append((kind, value))
        elif isinstance(value, torch.Tensor):
            parts.append(spec_of(value))
        elif kind is tuple or kind is list:
            parts.append((kind, _key(value)))
        elif kind is dict:
            parts.append((tuple(value), _key(tuple(value.values()))))
        elif kind is slice:
            parts.append((slice, _key((value.start, value.stop, value.step))))
        else:
            hash(value)
            parts.append(value)
    return tuple(parts)
