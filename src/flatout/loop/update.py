"""The optimizer's step: clipped before, and believed only where all of it has happened, on every rank."""

from __future__ import annotations

import logging
from typing import Any

from flatout.loop.memory import OutOfMemory, is_out_of_memory, release
from flatout.loop.ranks import may_exchange
from flatout.loop.training import Training
from flatout.plan.errors import LoopError

LOGGER = logging.getLogger("flatout")
LEANER = "foreach=False or fused=True needs less memory for a moment, so do smaller micro-batches (micro_batch=...)."


class Update:
    """``clip`` is the largest norm of the gradient, or None."""

    def __init__(self, training: Training, clip: float | None) -> None:
        self.training, self.clip = training, clip
        self._first = FirstUpdate(training)

    def goes_on(self) -> None:
        """The optimizer was given the state of a save."""
        self._first = FirstUpdate(self.training)

    def clipped(self) -> Any:
        """The gradient's norm before clipping; None without."""
        if self.clip is None:
            return None
        training = self.training
        training.precision.unscale(training.optimizer)
        if training.divided is not None:
            return training.divided.clip(training.parameters, self.clip)
        return training.torch.nn.utils.clip_grad_norm_(training.parameters, self.clip)

    def make(self, index: int) -> str:
        """Why the optimizer's step was left out, or nothing. Raises LoopError, also where it has failed on another rank."""
        ranks = self.training.ranks
        if ranks is None:
            return self._made(index, twice=True)
        try:
            skipped = self._made(index, twice=not may_exchange(self.training.optimizer))
        except Exception as error:
            ranks.updated(error)  # nobody trains on where one rank has half a step
            raise
        ranks.updated(None)
        return skipped

    def _made(self, index: int, twice: bool) -> str:
        """Out of memory in the optimizer's first step, before any weight has moved, it is tried once more."""
        first, training = self._first, self.training
        if first.fresh:
            first.begins()
        for _ in range(1 + twice):
            try:
                if training.precision.plain:
                    training.optimizer.step()
                    skipped = ""
                else:
                    skipped = training.precision.step(training.optimizer)
                first.fresh = first.fresh and bool(skipped)
                return skipped
            except KeyboardInterrupt:
                if not first.undo():
                    LOGGER.warning("interrupted inside the optimizer: the weights may be those of half of step %d. Load your last save to be sure", index)
                raise
            except Exception as error:
                if not is_out_of_memory(training.torch, error):
                    raise
                failed = OutOfMemory.seen(error, 0)
            release(training.torch, training.device)
            if not first.undo():
                raise LoopError(f"the optimizer ran out of memory and may have begun to move weights ({failed.said}), so they may be those of half a step "
                                f"and cannot be trusted: go on from your last save. {LEANER}")
        raise LoopError(f"the optimizer ran out of memory{', twice,' if twice else ''} before it had moved any weight ({failed.said}). {LEANER}")


class FirstUpdate:
    """Whether an optimizer that failed has changed anything. ``fresh`` until its first step is done.

    That is when state is made and memory is most likely to end, and the norms of all parameters tell. Later nothing does that would be worth its time in
    each step: torch counts the writes to a tensor (``_version``), but not those of fused steps, nor everywhere those of foreach ones.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.fresh = not training.optimizer.state
        self._norms: Any = None

    def begins(self) -> None:
        self._norms = self._norms_now()

    def undo(self) -> bool:
        """Take away state that was only just made. False where something else may have changed, which nobody can undo."""
        if not self.fresh or not all(self.training.torch.equal(a, b) for a, b in zip(self._norms, self._norms_now(), strict=True)):
            return False
        self.training.optimizer.state.clear()
        return True

    def _norms_now(self) -> Any:
        with self.training.torch.no_grad():
            divided = self.training.divided
            own = self.training.parameters if divided is None else [divided.local(p) for p in self.training.parameters]
            return self.training.torch._foreach_norm(own)
