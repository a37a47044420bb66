"""What the operators of a running program get and return: arguments, shapes of results, masks that stay constant."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from flatout.kernels.attend import mask_properties
from flatout.kernels.attention_forms import AttentionForm

MAX_CACHED_RESULTS = 4096
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


class RuntimeArguments:
    """Reads arguments of a running program. ``numbers`` maps tensors on a device to their known values."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    def tensor(self, arg: object) -> Any:
        return arg if isinstance(arg, Tensor) else None

    def number(self, arg: object) -> float | None:
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return float(arg)
        if (
            not isinstance(arg, Tensor)
            or type(arg) not in PLAIN_TENSORS
            or arg.dim()
            or arg.requires_grad
            or arg.is_complex()
        ):
            return None
        return float(arg) if arg.device.type == "cpu" else self._numbers.get(arg)

    def same(self, left: object, right: object) -> bool:
        return bool(left == right)


def is_usable_later(arg: Tensor) -> bool:
    """Whether this tensor can be used later: an optimizer changes weights, nothing is expected to change others."""
    if type(arg) not in PLAIN_TENSORS or arg.is_inference():
        return False
    base = arg if arg._base is None else arg._base
    return not (base.requires_grad and base.is_leaf)


def autocast_state(device: torch.device) -> tuple[str, torch.dtype, bool]:
    return device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)


_empty_results: dict[Any, Tensor | None] = {}


def empty_result(
    function: Callable[..., Any],
    device: torch.device,
    keeps_dtype: bool,
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
        if key in _empty_results:
            return _empty_results[key]
    except TypeError:  # an argument that cannot be hashed
        return None
    if len(_empty_results) >= MAX_CACHED_RESULTS:
        _empty_results.clear()
    _empty_results[key] = None
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            with torch.autocast(*autocast[:2], enabled=False):
                meta_args, meta_kwargs = tree_map_only(Tensor, _without_memory, (args, kwargs))
                result = function(*meta_args, **meta_kwargs)
            dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
            if not keeps_dtype:
                tiny_args, tiny_kwargs = tree_map_only(Tensor, _tiny, (args, kwargs))
                dtype = function(*tiny_args, **tiny_kwargs).dtype
        except Exception:  # the real call fails in the script
            return None
    _empty_results[key] = torch.empty_strided(result.shape, result.stride(), dtype=dtype, device="meta")
    return _empty_results[key]


def _without_memory(tensor: Tensor) -> Tensor:
    """All floating types count as one here; ``empty_result`` determines the type under autocast separately."""
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _tiny(tensor: Tensor) -> Tensor:
    """Axes of two, because products over an axis of one are computed differently."""
    return torch.zeros((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def _key(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype, arg.device
    return tuple(map(_key, arg)) if isinstance(arg, (list, tuple)) else (type(arg), arg)


# Operators that make masks of constants and of other masks.
MASK_OPERATORS = re.compile(
    "__(getitem|eq|ne|and|or|invert|rsub)__|getitem|eq|ne|and_|or_|invert|inv|lt|le|gt|ge|sub|mul|neg|bool|"
    "(logical|bitwise)_(not|or|and)|to|type|float|tril|triu|ones|zeros|full|arange|view|unsqueeze|squeeze|expand|masked_fill|tensor"
)


class MaskRegistry:
    """Names for the values of tensors: tensors with one name have the same values.

    The kind of a mask is determined once per name.
    """

    def __init__(self) -> None:
        self.numbers = WeakIdKeyDictionary()  # tensors of one number
        self._names = WeakIdKeyDictionary()
        self._serials = WeakIdKeyDictionary()
        self._count = 0
        self._recent_names: tuple[set[Any], set[Any]] = set(), set()  # in earlier steps, in this step
        self._pending: dict[Any, AttentionForm] = {}
        self._properties: dict[Any, tuple[bool, bool]] = {}

    def step(self) -> None:
        """Between two steps, when no graph of the forward pass is being recorded: read values now."""
        self._recent_names = self._recent_names[1], set()
        self._properties |= {name: mask_properties(form) for name, form in self._pending.items()}
        self._pending.clear()

    def call_and_name(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function and name its result."""
        result = function(*args, **kwargs)
        if type(result) is Tensor and not result.requires_grad:
            try:
                recipe = (
                    name,
                    *(self._name_of(arg) for arg in args),
                    *((key, self._name_of(kwargs[key])) for key in sorted(kwargs)),
                )
                hash(recipe)
            except TypeError:
                return result
            self._names[result] = recipe, result._version
            value = {"full": (*args[1:2], kwargs.get("fill_value"))[0], "tensor": (*args[:1], None)[0]}.get(
                name
            )
            if isinstance(value, (int, float)) and not result.dim() and result.is_floating_point():
                self.numbers[result] = float(value)
        return result

    def _name_of(self, value: object) -> Any:
        if isinstance(value, Tensor):
            if value.requires_grad or type(value) not in PLAIN_TENSORS or value.is_inference():
                raise TypeError
            recipe, version = self._names.get(value, (None, 0))
            if recipe is not None and version == value._version:
                return recipe
            if value not in self._serials:
                self._count += 1
                self._serials[value] = self._count
            return self._serials[value], value._version
        if isinstance(value, slice):
            return slice, self._name_of(value.start), self._name_of(value.stop), self._name_of(value.step)
        return tuple(map(self._name_of, value)) if isinstance(value, (list, tuple)) else (type(value), value)

    def properties(self, form: AttentionForm) -> tuple[bool, bool]:
        """Whether the masks of this form are one causal mask, and whether no row is fully masked.

        Both are False while unknown.
        """
        if len(form.masks) != 1 or form.masks[0].tensor.requires_grad:
            return False, False
        mask = form.masks[0]
        try:
            name = mask.kind, form.rows, form.columns, self._name_of(mask.tensor)
        except TypeError:
            return False, False
        self._recent_names[1].add(name)
        if name not in self._properties and name in self._recent_names[0]:
            self._pending[name] = replace(form, q=None, k=None)
        return self._properties.get(name, (False, False))
