"""One deferred operator call of the script."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flatout.kernels.attention_reading import AttentionForm

if TYPE_CHECKING:
    from flatout.kernels.attention_deferred import DeferredScores
    from flatout.kernels.attention_mode import AttentionMode

VIEWS = frozenset(
    (
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "contiguous",
        "detach",
        "transpose",
        "permute",
        "dropout",
    )
)
MAY_BE_VIEWS = VIEWS | {"to", "type", "type_as", "float", "half", "bfloat16", "double"}


class DeferredOperation:
    """One operator call of the script with its arguments, and the value once something reads it."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        form: AttentionForm | None,
        watch: AttentionMode,
        ordinal: int,
    ) -> None:
        """Deferred tensors among the arguments are represented by their steps."""
        self.function, self.args, self.kwargs = function, args, kwargs
        self.form, self.watch, self.ordinal = form, watch, ordinal
        self.value: Tensor | None = None
        self.owner: weakref.ref[DeferredScores] | None = None
        self.later: weakref.WeakSet[DeferredOperation] = weakref.WeakSet()
        self.before: DeferredOperation | None = next(
            (each for each in args if isinstance(each, DeferredOperation)), None
        )
        self.tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        self.versions = [tensor._version for tensor in self.tensors]
        self.device: torch.device = self.tensors[0].device if self.before is None else self.before.device
        self.autocast = autocast_state(self.device)
        self.leaves = {
            id(tensor): tensor for tensor in self.tensors if tensor.requires_grad
        }  # inputs that receive a gradient
        if self.before is not None:
            self.leaves |= self.before.leaves
            self.before.later.add(self)

    @property
    def is_seen_elsewhere(self) -> bool:
        """Whether this may be a view of another live tensor, or another tensor a view of this."""
        step = self
        while step.before is not None and step.function.__name__ in MAY_BE_VIEWS:
            step = step.before
            if step.owner is not None and step.owner() is not None:
                return True
        return bool(self.later)

    def compute(self) -> Tensor:
        """The value that the script would have had here, in the same place of the graph.

        It is kept once computed.
        """
        if self.value is None:
            self.watch.looked.add(self.ordinal)
            self.value = self.made({})
        return self.value

    def made(self, instead: dict[int, Tensor]) -> Tensor:
        """Run the operators of the script from the start.

        ``instead`` maps ids of tensors to their replacements.
        """
        self.check()
        args, kwargs = tree_map_only(
            DeferredOperation,
            lambda step: step.made(instead) if instead else step.compute(),
            (self.args, self.kwargs),
        )
        if instead:
            args, kwargs = tree_map_only(
                Tensor, lambda tensor: instead.get(id(tensor), tensor), (args, kwargs)
            )
        device, dtype, enabled = self.autocast
        with (
            torch.inference_mode(False),
            torch.autocast(device, dtype, enabled),
        ):  # this also enables gradients, as before
            found: Tensor = self.function(*args, **kwargs)
        return found

    def check(self) -> None:
        """Raises RuntimeError if the values from which the script computed this no longer exist."""
        if [tensor._version for tensor in self.tensors] != self.versions:
            raise RuntimeError(
                "the script uses attention weights after changing one of their inputs in place, "
                "and the lever attention has not computed them: run without attention."
            )
        if self.before is not None and self.value is None:
            self.before.check()


def autocast_state(device: torch.device) -> tuple[str, torch.dtype, bool]:
    return device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
