"""Tensor values in runs without computation: the values that shapes and decisions of a script depend on.

Where operators run for shapes only, a tensor has no values. Some are needed all the same: the optimizer's
step count, a length, a mask. They come from constants and integers of the batch, so whatever is made of these
alone is really computed, as long as it is small. All other queries get the answer of an ordinary step:
numbers are 1, nothing is infinite, no comparison "less than" holds, and every `all` holds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MOST_ELEMENTS = 2**18  # limit for values that are really computed
ALL = ("all", "_is_all_true")  # such checks expect success; "any" checks for errors
SAME, OPPOSITE = (
    ("view", "reshape", "clone", "detach", "_to_copy", "alias", "unsqueeze", "squeeze", "select"),
    ("bitwise_not", "logical_not"),
)
JUNCTIONS = {
    "mul": all,
    "bitwise_and": all,
    "logical_and": all,
    "add": any,
    "bitwise_or": any,
    "logical_or": any,
}


class KnownValues:
    """Known values. ``of`` returns a real tensor or None. All methods run with dispatch modes off."""

    def __init__(self, torch: ModuleType) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.torch = torch
        self._values = WeakIdKeyDictionary()
        self._truths = WeakIdKeyDictionary()  # boolean tensors: their most likely value
        self.guessed: set[str] = set()  # queries that were answered by a guess

    def set(self, tensor: Tensor, value: object) -> None:
        self._values[tensor] = value

    def of(self, tensor: Tensor) -> Any:
        return self._values.get(tensor)

    def worth_keeping(self, tensor: Tensor) -> bool:
        """Whether the value of a real tensor may matter: a single number, or not too many integers."""
        if tensor.layout != self.torch.strided or tensor.requires_grad or tensor.device.type != "cpu":
            return False
        return bool(
            tensor.numel() <= 1
            or (
                tensor.numel() <= MOST_ELEMENTS
                and not tensor.dtype.is_floating_point
                and not tensor.dtype.is_complex
            )
        )

    def computed(self, function: Any, leaves: list[Any], rebuild: Callable[..., Any]) -> Any:
        """Compute an operator whose tensors are all known and which draws nothing; else return None.

        Writes into known values.
        """
        torch = self.torch
        if torch.Tag.nondeterministic_seeded in function.tags:
            return None
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = [self.of(tensor) for tensor in tensors]
        if any(value is None for value in values) or sum(value.numel() for value in values) > MOST_ELEMENTS:
            return None
        known = iter(values)
        args, kwargs = rebuild([next(known) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        if not tensors and not self._worth_making(function._schema.name, args, kwargs):
            return None
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):  # a guessed value does not fit
            return None

    def _worth_making(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the result of a constructor may matter: a single number, or not too many integers."""
        if name.startswith(("aten::empty", "aten::_empty")):
            return False
        sizes = next((arg for arg in (*args, kwargs.get("size")) if isinstance(arg, (list, tuple))), ())
        elements = prod(int(size) for size in sizes)
        whole = name.startswith("aten::arange") or kwargs.get("dtype") in (
            self.torch.int64,
            self.torch.int32,
            self.torch.bool,
        )
        few = all(abs(arg) <= MOST_ELEMENTS for arg in args if isinstance(arg, int)) or name.startswith(
            "aten::full"
        )
        return few and elements <= (MOST_ELEMENTS if whole else 1)

    def note(self, function: Any, leaves: list[Any], made: Any, values: object) -> None:
        """Remember the known tensors of an operator; ``values`` are theirs, if they were computed."""
        torch = self.torch
        several = isinstance(made, (list, tuple))
        found = values if several and isinstance(values, (list, tuple)) else [values]
        for each, value in zip_longest(made if several else [made], found):
            if not isinstance(each, torch.Tensor):
                continue
            if (
                isinstance(value, torch.Tensor)
                and value.shape == each.shape
                and value.numel() <= MOST_ELEMENTS
            ):
                if not value.dtype.is_floating_point or value.numel() <= 1:
                    self.set(each, value)
            elif function._schema.is_mutable and each.numel() > 1:
                # a write into a single number leaves it unchanged: a counter, a flag
                self._values.pop(each, None)
            elif each.numel() <= 1 and each.dtype in (torch.int64, torch.int32) and self.of(each) is None:
                # set now, so that results made from it are consistent
                self.set(each, torch.ones(each.shape, dtype=each.dtype, device="cpu"))
            if each.dtype == torch.bool:
                self._truths[each] = self._truth(function, leaves)

    def _truth(self, function: Any, leaves: list[Any]) -> bool:
        """Whether a check is most likely true, judged by its operator: "finite" is x == x and |x| != inf."""
        name = function._schema.name.removeprefix("aten::").removesuffix("_")
        tensors = [leaf for leaf in leaves if isinstance(leaf, self.torch.Tensor)]
        asked = [bool(self._truths.get(tensor, False)) for tensor in tensors]
        if name in ("eq", "ne"):
            same = len(tensors) == 2 and tensors[0] is tensors[1]
            infinite = any(
                isinstance(leaf, float) and leaf in (float("inf"), float("-inf")) for leaf in leaves
            )
            return same if name == "eq" else infinite and not same
        if name in ALL or name == "isfinite":
            return True
        if name in JUNCTIONS and asked:
            return JUNCTIONS[name](asked)
        if name in OPPOSITE and asked:
            return not asked[0]
        return asked[0] if name in SAME and asked else False

    def number(self, tensor: Tensor) -> Any:
        """Return the single number of a tensor as a Python number."""
        value = self.of(tensor)
        if value is not None and value.numel() == 1:
            return value.item()
        if tensor.dtype == self.torch.bool:
            self.guessed.add("a decision")
            return bool(self._truths.get(tensor, False))
        return 1.0 if tensor.dtype.is_floating_point else 1
