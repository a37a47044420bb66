"""Which function made a tensor, past functions that only change its shape or its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.diagnose.invariant import Invariant, argument
from flatout.diagnose.running_modules import has_values

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.diagnose.observed_program import ObservedProgram

COPIES = frozenset({"clone", "contiguous", "double", "float", "to"})
SHAPES = COPIES | {
    "__getitem__",
    "flatten",
    "permute",
    "reshape",
    "squeeze",
    "transpose",
    "unsqueeze",
    "view",
}


class ValueSources(Invariant):
    """Knows for each result of ``made_by`` the name of the function."""

    made_by: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, program: ObservedProgram) -> None:
        super().__init__(program)
        self.sources = program.tensor_map()

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        tensor = self.program.torch.Tensor
        if not isinstance(result, tensor):
            return
        if name in self.made_by:
            self.sources[result] = name
        elif name in SHAPES:
            value = argument(args, kwargs, 0, "input")
            source = self.sources.get(value) if isinstance(value, tensor) else None
            if source is not None:
                self.sources[result] = source


def on_simplex(scores: Tensor) -> bool:
    """Whether there are several rows, and each has several values, none of them negative, with a sum of 1."""
    if (
        scores.ndim < 2
        or scores.shape[1] < 2
        or scores.numel() < 2 * scores.shape[1]
        or not has_values(scores)
    ):
        return False
    sums = scores.detach().float().sum(1)
    return bool((scores >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())
