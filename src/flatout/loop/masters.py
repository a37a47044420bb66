"""Master weights: a model in bfloat16 or float16 whose optimizer updates float32 copies of its parameters.

A narrow weight loses an update that is smaller than half a unit in its last place (in bfloat16: 1/512 of the
weight). The copies keep it, and the model gets them rounded after each step. The model's own parameters stay
the same objects, and its state_dict stays the same.

Gradients of micro-batches are accumulated in float32 as well. If ranks exchange gradients inside the backward
pass, they are accumulated in the model's dtype.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch.optim import Optimizer

LOGGER = logging.getLogger("flatout")
HELD: WeakKeyDictionary[Any, Masters] = WeakKeyDictionary()  # by optimizer: a new Loop takes over


class Masters:
    """``pairs`` are (the model's parameter, its float32 copy).

    ``together``: ranks exchange gradients inside backward.
    """

    def __init__(self, torch: ModuleType, optimizer: Optimizer, dtype: object, together: bool) -> None:
        self.torch, self.optimizer, self.together = torch, optimizer, together
        self.pairs: list[tuple[Any, Any]] = []
        for group in optimizer.param_groups:
            for at, p in enumerate(group["params"]):
                if p.dtype == dtype:
                    self.pairs.append((p, p.detach().float().requires_grad_(p.requires_grad)))
                    group["params"][at] = self.pairs[-1][1]
        self._own = [p for p, _ in self.pairs]
        self._copies = [master.detach() for _, master in self.pairs]
        self._change_keys(dict(self.pairs))
        self._written = self._writes()

    @classmethod
    def made(
        cls,
        torch: ModuleType,
        optimizer: Optimizer,
        parameters: list[Any],
        dtype: object,
        name: str,
        together: bool,
    ) -> Masters:
        """Put copies into the optimizer and into ``parameters``. Raises LoopError if none has this dtype."""
        before = HELD.get(optimizer)
        if before is not None:
            before.close()
            parameters[:] = [before.own_of(p) for p in parameters]
        if not any(p.dtype == dtype for p in parameters):
            has, call = (
                str(parameters[0].dtype).removeprefix("torch."),
                "model.half()" if dtype == torch.float16 else "model.bfloat16()",
            )
            raise LoopError(
                f'precision="{name}" needs parameters in {str(dtype).removeprefix("torch.")}; those of this model are {has}. '
                f'Call {call} before you make the optimizer, or use precision="{name.removesuffix("-master")}", which keeps the weights '
                "and computes in autocast."
            )
        found = cls(torch, optimizer, dtype, together)
        masters = {id(p): master for p, master in found.pairs}
        parameters[:] = [masters.get(id(p), p) for p in parameters]
        HELD[optimizer] = found
        return found

    def own_of(self, master: object) -> Any:
        """The model's parameter of a copy; any other tensor unchanged."""
        return next((p for p, each in self.pairs if each is master), master)

    def collect_early(self) -> None:
        """After a backward pass: move gradients into float32 before the next pass adds to them."""
        if not self.together:
            self.collect()

    def collect(self) -> None:
        """Move the model's gradients to those of the copies."""
        for p, master in self.pairs:
            if p.grad is not None:
                gradient, p.grad = p.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def forget(self) -> None:
        """Drop the gradients of a step that is repeated."""
        for p, _ in self.pairs:
            p.grad = None

    def follow(self) -> None:
        """Before a step: refresh the copies if the model's parameters were written to.

        This happens when a checkpoint is loaded, for example.
        """
        if self._writes() != self._written:
            LOGGER.info(
                "the model's parameters were changed between two steps: refreshing the float32 copies from them"
            )
            with self.torch.no_grad():
                self.torch._foreach_copy_(self._copies, self._own)
            self._written = self._writes()

    def hand_back(self) -> None:
        """After the optimizer's step: copy the float32 values into the model, rounded."""
        with self.torch.no_grad():
            self.torch._foreach_copy_(self._own, self._copies)
        self._written = self._writes()

    def copies(self) -> list[Any]:
        """The float32 copies, for a checkpoint."""
        return self._copies

    def take(self, copies: list[Any]) -> None:
        """Load the copies from a checkpoint; the model's own parameters are loaded separately."""
        with self.torch.no_grad():
            for mine, theirs in zip(self._copies, copies, strict=True):
                mine.copy_(theirs)
        self._written = self._writes()

    def close(self) -> None:
        """Give the optimizer the model's own parameters again.

        Its state is cast to their dtype, as load_state_dict would do.
        """
        own = {master: p for p, master in self.pairs}
        for group in self.optimizer.param_groups:
            group["params"][:] = [own.get(p, p) for p in group["params"]]
        self._change_keys(own)
        HELD.pop(self.optimizer, None)

    def _change_keys(self, other: dict[Any, Any]) -> None:
        """Move the optimizer's state from one parameter to another, and cast it to the new dtype."""
        state = self.optimizer.state
        for old, new in other.items():
            if old in state:
                state[new] = {
                    key: value.to(new.dtype)
                    if hasattr(value, "dim") and value.dim() and value.is_floating_point()
                    else value
                    for key, value in state.pop(old).items()
                }

    def _writes(self) -> int:
        return sum(p._version for p in self._own)
