"""Master weights: a model in bfloat16 or float16 whose optimizer sees float32 copies of its parameters.

An update that is smaller than half a unit in the last place of a narrow weight is lost (in bfloat16: 1/512 of the weight). The copies keep it; the model
gets them rounded after each step. The model's own parameters stay the very objects they are, and so does its state_dict.

Gradients of micro-batches are added up in float32, too, but for those that ranks exchange inside the backward pass: these are added where they lie.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

from flatout.plan.errors import LoopError

LOGGER = logging.getLogger("flatout")
HELD: WeakKeyDictionary[Any, Masters] = WeakKeyDictionary()  # by optimizer: a Loop that is made anew takes over


class Masters:
    """``pairs`` are (the model's parameter, its float32 copy). ``together``: ranks exchange gradients inside the backward pass."""

    def __init__(self, torch: Any, optimizer: Any, dtype: Any, together: bool) -> None:
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
    def made(cls, torch: Any, optimizer: Any, parameters: list[Any], dtype: Any, name: str, together: bool) -> Masters:
        """Puts copies into the optimizer, and into ``parameters``. Raises LoopError where none is of this dtype."""
        before = HELD.get(optimizer)
        if before is not None:
            before.close()
            parameters[:] = [before.own_of(p) for p in parameters]
        if not any(p.dtype == dtype for p in parameters):
            has, call = str(parameters[0].dtype).removeprefix("torch."), "model.half()" if dtype == torch.float16 else "model.bfloat16()"
            raise LoopError(f'precision="{name}" is for a model whose parameters are {str(dtype).removeprefix("torch.")}; those of this one are {has}. '
                            f'Say {call} before the optimizer is made, or precision="{name.removesuffix("-master")}", which keeps the weights as they are '
                            'and computes in autocast.')
        found = cls(torch, optimizer, dtype, together)
        masters = {id(p): master for p, master in found.pairs}
        parameters[:] = [masters.get(id(p), p) for p in parameters]
        HELD[optimizer] = found
        return found

    def own_of(self, master: Any) -> Any:
        """The model's parameter of a copy; of anything else itself."""
        return next((p for p, each in self.pairs if each is master), master)

    def collect_early(self) -> None:
        """After a backward pass: into float32 before the next one adds to it."""
        if not self.together:
            self.collect()

    def collect(self) -> None:
        """Add the model's gradients to those of the copies, and take them away."""
        for p, master in self.pairs:
            if p.grad is not None:
                gradient, p.grad = p.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def forget(self) -> None:
        """The gradients of a step that is done again."""
        for p, _ in self.pairs:
            p.grad = None

    def follow(self) -> None:
        """Before a step: where somebody has written to the model's parameters (a checkpoint was loaded), the copies are made anew."""
        if self._writes() != self._written:
            LOGGER.info("the model's parameters were written to between two steps: the float32 copies are made anew from them")
            with self.torch.no_grad():
                self.torch._foreach_copy_(self._copies, self._own)
            self._written = self._writes()

    def hand_back(self) -> None:
        """After the optimizer's step: the model gets the copies, rounded."""
        with self.torch.no_grad():
            self.torch._foreach_copy_(self._own, self._copies)
        self._written = self._writes()

    def copies(self) -> list[Any]:
        """The float32 copies, for a save."""
        return self._copies

    def take(self, copies: list[Any]) -> None:
        """Those of a save; the model has its own."""
        with self.torch.no_grad():
            for mine, theirs in zip(self._copies, copies, strict=True):
                mine.copy_(theirs)
        self._written = self._writes()

    def close(self) -> None:
        """The optimizer has the model's own parameters again, with its state in their dtype, as load_state_dict would make it."""
        own = {master: p for p, master in self.pairs}
        for group in self.optimizer.param_groups:
            group["params"][:] = [own.get(p, p) for p in group["params"]]
        self._change_keys(own)
        HELD.pop(self.optimizer, None)

    def _change_keys(self, other: dict[Any, Any]) -> None:
        """State that the optimizer keeps of a parameter becomes that of another one, of its dtype."""
        state = self.optimizer.state
        for old, new in other.items():
            if old in state:
                state[new] = {key: value.to(new.dtype) if hasattr(value, "dim") and value.dim() and value.is_floating_point() else value
                              for key, value in state.pop(old).items()}

    def _writes(self) -> int:
        return sum(p._version for p in self._own)
