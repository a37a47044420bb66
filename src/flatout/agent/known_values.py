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

MAX_ELEMENTS = 2**18  # limit for values that are really computed
EXPECTED_TRUE = ("all", "_is_all_true")  # such checks expect success; "any" checks for errors
KEEP_TRUTH, NEGATE_TRUTH = (
    ("view", "reshape", "clone", "detach", "_to_copy", "alias", "unsqueeze", "squeeze", "select"),
    ("bitwise_not", "logical_not"),
)
COMBINE_TRUTHS = {
    "mul": all,
    "bitwise_and": all,
    "logical_and": all,
    "add": any,
    "bitwise_or": any,
    "logical_or": any,
}


class KnownValues:
    """Known values. ``get`` returns a real tensor or None. All methods run with dispatch modes off."""

    def __init__(self, torch: ModuleType) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.torch = torch
        self._values = WeakIdKeyDictionary()
        self._truths = WeakIdKeyDictionary()  # boolean tensors: their most likely value
        self.guesses: set[str] = set()  # queries that were answered by a guess

    def set(self, tensor: Tensor, value: object) -> None:
        self._values[tensor] = value

    def get(self, tensor: Tensor) -> Any:
        return self._values.get(tensor)

    def worth_keeping(self, tensor: Tensor) -> bool:
        """Whether the value of a real tensor may matter: a single number, or not too many integers."""
        if tensor.layout != self.torch.strided or tensor.requires_grad or tensor.device.type != "cpu":
            return False
        return bool(
            tensor.numel() <= 1
            or (
                tensor.numel() <= MAX_ELEMENTS
                and not tensor.dtype.is_floating_point
                and not tensor.dtype.is_complex
            )
        )

    def compute(self, function: Any, leaves: list[Any], rebuild: Callable[..., Any]) -> Any:
        """Compute an operator whose tensors are all known and which draws nothing; else return None.

        Writes into known values.
        """
        torch = self.torch
        if torch.Tag.nondeterministic_seeded in function.tags:
            return None
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = [self.get(tensor) for tensor in tensors]
        if any(value is None for value in values) or sum(value.numel() for value in values) > MAX_ELEMENTS:
            return None
        known = iter(values)
        args, kwargs = rebuild([next(known) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        if not tensors and not self._worth_computing(function._schema.name, args, kwargs):
            return None
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):  # a guessed value does not fit
            return None

    def _worth_computing(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name.startswith(("aten::empty", "aten::_empty")):
            return False
        sizes = next((arg for arg in (*args, kwargs.get("size")) if isinstance(arg, (list, tuple))), ())
        elements = prod(int(size) for size in sizes)
        is_integer = name.startswith("aten::arange") or kwargs.get("dtype") in (
            self.torch.int64,
            self.torch.int32,
            self.torch.bool,
        )
        small_args = all(abs(arg) <= MAX_ELEMENTS for arg in args if isinstance(arg, int)) or name.startswith(
            "aten::full"
        )
        return small_args and elements <= (MAX_ELEMENTS if is_integer else 1)

    def record_outputs(self, function: Any, leaves: list[Any], result: Any, values: object) -> None:
        """Remember the known tensors of an operator; ``values`` are theirs, if they were computed."""
        torch = self.torch
        is_sequence = isinstance(result, (list, tuple))
        output_values = values if is_sequence and isinstance(values, (list, tuple)) else [values]
        for output, value in zip_longest(result if is_sequence else [result], output_values):
            if not isinstance(output, torch.Tensor):
                continue
            if (
                isinstance(value, torch.Tensor)
                and value.shape == output.shape
                and value.numel() <= MAX_ELEMENTS
            ):
                if not value.dtype.is_floating_point or value.numel() <= 1:
                    self.set(output, value)
            elif function._schema.is_mutable and output.numel() > 1:
                # a write into a single number leaves it unchanged: a counter, a flag
                self._values.pop(output, None)
            elif (
                output.numel() <= 1
                and output.dtype in (torch.int64, torch.int32)
                and self.get(output) is None
            ):
                # set now, so that results made from it are consistent
                self.set(output, torch.ones(output.shape, dtype=output.dtype, device="cpu"))
            if output.dtype == torch.bool:
                self._truths[output] = self._truth(function, leaves)

    def _truth(self, function: Any, leaves: list[Any]) -> bool:
        name = function._schema.name.removeprefix("aten::").removesuffix("_")
        tensors = [leaf for leaf in leaves if isinstance(leaf, self.torch.Tensor)]
        truths = [bool(self._truths.get(tensor, False)) for tensor in tensors]
        if name in ("eq", "ne"):
            same = len(tensors) == 2 and tensors[0] is tensors[1]
            infinite = any(
                isinstance(leaf, float) and leaf in (float("inf"), float("-inf")) for leaf in leaves
            )
            return same if name == "eq" else infinite and not same
        if name in EXPECTED_TRUE or name == "isfinite":
            return True
        if name in COMBINE_TRUTHS and truths:
            return COMBINE_TRUTHS[name](truths)
        if name in NEGATE_TRUTH and truths:
            return not truths[0]
        return truths[0] if name in KEEP_TRUTH and truths else False

    def number(self, tensor: Tensor) -> Any:
        """Return the single number of a tensor as a Python number."""
        value = self.get(tensor)
        if value is not None and value.numel() == 1:
            return value.item()
        if tensor.dtype == self.torch.bool:
            self.guesses.add("a decision")
            return bool(self._truths.get(tensor, False))
        return 1.0 if tensor.dtype.is_floating_point else 1
