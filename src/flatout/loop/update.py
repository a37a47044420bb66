"""The optimizer's step: clip first, and trust the update only if it completed."""

import logging
from typing import Any

from flatout.loop.gradient import Training
from flatout.loop.memory import OutOfMemory, free_memory, is_out_of_memory
from flatout.schema.errors import LoopError

LOGGER = logging.getLogger("flatout")
ADVICE = "foreach=False, fused=True or smaller micro-batches (micro_batch=...) need less memory at the peak."


class Update:
    """``clip`` is the maximum norm of the gradient, or None."""

    def __init__(self, training: Training, clip: float | None) -> None:
        self.training, self.clip = training, clip
        self._first = FirstUpdate(training)

    def reset(self) -> None:
        """Call after the optimizer has loaded its state from a checkpoint."""
        self._first = FirstUpdate(self.training)

    def clip_gradient(self) -> Any:
        """Clip the gradient and return its norm before clipping; None without ``clip``."""
        if self.clip is None:
            return None
        training = self.training
        training.precision.unscale(training.optimizer)
        return training.torch.nn.utils.clip_grad_norm_(training.parameters, self.clip)

    def step(self, index: int) -> str:
        """Why the optimizer's step was skipped, or "". Raises LoopError.

        In a single process, it is retried once if the optimizer's first step runs out of memory before any
        weight has changed. With several ranks, the optimizer may communicate."""
        first, training = self._first, self.training
        may_retry = training.ranks == 1
        if first.is_first:
            first.record_norms()
        for _ in range(1 + may_retry):
            try:
                if training.precision.plain:
                    training.optimizer.step()
                    skipped = ""
                else:
                    skipped = training.precision.step(training.optimizer)
                first.is_first = first.is_first and bool(skipped)
                return skipped
            except KeyboardInterrupt:
                if not first.undo():
                    LOGGER.warning(
                        "interrupted inside the optimizer: the weights may be those of half of step %d. Load your last checkpoint to be safe",
                        index,
                    )
                raise
            except Exception as error:
                if not is_out_of_memory(training.torch, error):
                    raise
                failed = OutOfMemory.from_error(error, 0)
            free_memory(training.torch, training.device)
            if not first.undo():
                raise LoopError(
                    f"the optimizer ran out of memory and may have changed some weights ({failed.message}). They may be those of half a step: "
                    f"resume from your last checkpoint. {ADVICE}"
                )
        raise LoopError(
            f"the optimizer ran out of memory{' twice' if may_retry else ''} before it changed any weight ({failed.message}). {ADVICE}"
        )


class FirstUpdate:
    """Detects whether a failed optimizer step has changed anything. ``is_first`` until the first step is done.

    The first step creates state and is most likely to run out of memory; the norms of all parameters tell
    whether it changed any. In later steps no check is worth its time. torch counts the writes to a tensor
    (``_version``), but not those of fused steps, nor all of those of foreach steps."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.is_first = not training.optimizer.state
        self._norms: Any = None

    def record_norms(self) -> None:
        self._norms = self._norms_now()

    def undo(self) -> bool:
        """Remove state that was just created.

        False if anything else may have changed, which cannot be undone."""
        if not self.is_first or not all(
            self.training.torch.equal(a, b) for a, b in zip(self._norms, self._norms_now(), strict=True)
        ):
            return False
        self.training.optimizer.state.clear()
        return True

    def _norms_now(self) -> Any:
        with self.training.torch.no_grad():
            return self.training.torch._foreach_norm(self.training.parameters)
