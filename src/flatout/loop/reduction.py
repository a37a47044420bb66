"""How a loss over a batch follows from the losses over its parts: as their mean, as their sum, or not at all.

A gradient that is accumulated equals the whole batch's only where the loss is a mean or a sum over independent samples. That is tried out on the
first batch that is to be split, not assumed: the loss of the whole beside the losses of two uneven parts, without gradients, with the random state
and all buffers put back afterwards. Batch normalisation and losses between samples (contrastive ones) show as losses that do not add up, and
are refused in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flatout.loop.batches import split
from flatout.loop.randomness import kept_random_state
from flatout.plan.errors import LoopError

MEAN, SUM = "mean", "sum"
ROUNDING = {"torch.float64": 1e-9, "torch.float32": 1e-4}  # of a loss, relative; anything coarser counts as bfloat16
COARSE = 3e-2
DOES_NOT_FOLLOW = "the loss of a batch does not follow from the losses of its parts"
WAYS_OUT = ("Train with the loader's own batches (leave effective_batch and micro_batch out), let the loader make batches of the size that you want, or say "
            "allow_inexact=True if gradients of another loss are what you want.")


@dataclass(frozen=True)
class Answer:
    """What ``loss_fn`` gave: the loss, the number that it is averaged over (None: samples), further values by name."""

    loss: Any
    count: Any = None
    values: Any = None


def understood(given: Any) -> Answer:
    """``loss``, ``(loss, n)``, ``(loss, values)`` or ``(loss, n, values)``. Raises LoopError for anything else."""
    if hasattr(given, "backward"):
        return Answer(given)
    if isinstance(given, tuple) and given and hasattr(given[0], "backward") and len(given) <= 3:
        rest = list(given[1:])
        values = rest.pop() if rest and isinstance(rest[-1], dict) else None
        if len(rest) <= 1 and not any(isinstance(each, (dict, str)) for each in rest):
            return Answer(given[0], rest[0] if rest else None, values)
    spelled = f"a tuple of {', '.join(type(each).__name__ for each in given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
    raise LoopError(f"loss_fn gave {spelled}. It gives the loss (a scalar tensor), or (loss, n) with the number that it is averaged over, or one of the two "
                    "with a dict of further values behind it.")


class Recogniser:
    """Asks once. ``call(batch)`` is the user's loss_fn with the model, as training calls it."""

    def __init__(self, torch: Any, model: Any, call: Callable[[Any], Any]) -> None:
        self.torch, self.model, self.call = torch, model, call

    def recognise(self, batch: Any, size: int) -> str:
        """``mean`` or ``sum``. Raises LoopError where the loss of a batch does not follow from those of its parts."""
        self._refuse_batch_statistics()
        if size < 2:
            raise LoopError("the loader gives one sample at a time, so it cannot be tried out whether the loss is a mean or a sum over samples. "
                            "Say so: reduction=\"mean\" or reduction=\"sum\".")
        divisions = [[few, size - few] for few in sorted({1, max(1, size // 3)})]  # one may add up by chance
        device = next((p.device for p in self.model.parameters()), None)
        with kept_random_state(self.torch, device), self._kept_buffers(), self.torch.no_grad():
            with self._without_dropout():
                whole, again = self._loss(batch), self._loss(batch)
                if self._same(whole.loss, again.loss, whole.loss):
                    return self._compared(whole, batch, divisions)
            with self._evaluating():  # random in training: what it does then cannot be compared
                return self._compared(self._loss(batch), batch, divisions)

    def _loss(self, batch: Any) -> Answer:
        answer = understood(self.call(batch))
        if answer.loss.dim():
            raise LoopError(f"loss_fn gave a loss of shape {list(answer.loss.shape)}; a scalar is needed. Take its mean() or sum().")
        return answer

    def _compared(self, whole: Answer, batch: Any, divisions: list[list[int]]) -> str:
        found = [self._compare(whole, [self._loss(part) for part in split(batch, sizes)], sizes) for sizes in divisions]
        return found[-1]

    def _compare(self, whole: Answer, parts: list[Answer], sizes: list[int]) -> str:
        counts = [float(part.count) if part.count is not None else float(size) for part, size in zip(parts, sizes, strict=True)]
        losses = [float(part.loss) if count else 0.0 for part, count in zip(parts, counts, strict=True)]  # the mean over nothing has no part
        mean = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / max(sum(counts), 1e-300)
        # Zero is a mean as well as a sum; then it does not matter which.
        if self._same(mean, whole.loss, whole.loss):
            return MEAN
        said = f"the loss of the first batch of {sum(sizes)} samples is {float(whole.loss):.6g}, those of its first {sizes[0]} and last {sizes[1]} are " \
               f"{losses[0]:.6g} and {losses[1]:.6g}"
        if self._same(sum(losses), whole.loss, whole.loss):
            if whole.count is None:
                return SUM
            raise LoopError(f"loss_fn gives (loss, n), where the loss is to be the mean over n, but {said}: it is a sum. Give the mean, or the loss alone.")
        if whole.count is None:
            raise LoopError(f"{DOES_NOT_FOLLOW}: {said}; that is neither their mean nor their sum over samples. If it is a mean over something else (tokens, "
                            f"pixels that count), let loss_fn give (loss, n). If samples look at each other (contrastive losses, statistics over the batch), "
                            f"it cannot be split. {WAYS_OUT}")
        raise LoopError(f"{DOES_NOT_FOLLOW}: {said}, averaged over {counts[0]:g} and {counts[1]:g}. Samples look at each other, or n is not what the loss "
                        f"is averaged over. {WAYS_OUT}")

    def _same(self, a: Any, b: Any, like: Any) -> bool:
        a, b = float(a), float(b)
        rounding = ROUNDING.get(str(like.dtype), COARSE)
        if self.torch.is_autocast_enabled(like.device.type):
            rounding = COARSE
        return abs(a - b) <= rounding * max(abs(a), abs(b))

    # -- the model while it is asked ------------------------------------------------------------------------------------

    def _refuse_batch_statistics(self) -> None:
        kind = self.torch.nn.modules.batchnorm._BatchNorm
        mixing = [name or type(self.model).__name__ for name, module in self.model.named_modules()
                  if isinstance(module, kind) and (module.training or module.running_mean is None)]
        if mixing:
            more = f" and {len(mixing) - 1} more" if len(mixing) > 1 else ""
            raise LoopError(f"this model normalises over the batch (module {mixing[0]}{more}): {DOES_NOT_FOLLOW}. {WAYS_OUT}")

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Training mode, but for modules whose name tells that they only add randomness."""
        silent = [module for module in self.model.modules() if module.training and "drop" in type(module).__name__.lower() and not list(module.parameters())]
        try:
            for module in silent:
                module.training = False
            yield
        finally:
            for module in silent:
                module.training = True

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = [module for module in self.model.modules() if module.training]
        try:
            self.model.eval()
            yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def _kept_buffers(self) -> Iterator[None]:
        before = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            with self.torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
