"""Register masks that are compared once, not at every call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flatout.kernels.attend import causal_and_whole
from flatout.kernels.attention_forms import AttentionForm

# Operators that make masks of constants and of other masks.
MAKES_MASKS = re.compile(
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
        self._seen: tuple[set[Any], set[Any]] = set(), set()  # in earlier steps, in this step
        self._waiting: dict[Any, AttentionForm] = {}
        self._found: dict[Any, tuple[bool, bool]] = {}

    def step(self) -> None:
        """Between two steps, when no graph of the forward pass is being recorded: read values now."""
        self._seen = self._seen[1], set()
        self._found |= {name: causal_and_whole(form) for name, form in self._waiting.items()}
        self._waiting.clear()

    def follow(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
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

    def _name(self, thing: object) -> Any:
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
