"""Register masks that are compared once, not at every call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flatout.kernels.attend import mask_properties
from flatout.kernels.attention_forms import AttentionForm

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
            if value.requires_grad or type(value) not in (Tensor, torch.nn.Parameter) or value.is_inference():
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
