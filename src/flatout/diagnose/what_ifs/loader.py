"""What if batches were ready in advance? The same few batches are reused.

The first batches of each loader are cached. While the what-if is active, the loader's iterator returns them
in rotation. Evaluation gets its own batches as usual, so that it ends: gradients are off, or many batches pass
without a backward pass. Afterwards the real iterator continues from its position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flatout.agent.loader_methods import wrap_loader_method
from flatout.measure.nests import mapped, tensors_in
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from flatout.schema.program import Ledger, TrainingContext

MAX_CACHED_BATCHES = 4  # batches per loader: lengths may differ from batch to batch
MAX_BATCHES_WITHOUT_BACKWARD = 32  # of an iterator; more are an evaluation
MAX_SPARE_BYTES = 2**30  # no spare copy is kept beyond this size

_CACHES: WeakKeyDictionary[Any, dict[int, CachedBatches]] = (
    WeakKeyDictionary()
)  # context -> data set -> batches, kept across switches


class CachedBatches:
    """A few batches, returned in rotation as if each were new."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset  # a reference, so that its id is not reused
        self._batches: list[Any] = []
        self._versions: list[list[int]] = []
        self._spare: dict[int, Any] = {}
        self._turn = 0

    @property
    def full(self) -> bool:
        return len(self._batches) >= MAX_CACHED_BATCHES

    def add(self, batch: object) -> None:
        self._batches.append(_rebuilt(batch, lambda tensor: tensor))
        self._versions.append(_versions(batch))
        if sum(map(_bytes, self._batches)) < MAX_SPARE_BYTES:
            self._spare[len(self._batches) - 1] = _rebuilt(batch, lambda tensor: tensor.clone())

    def next_batch(self) -> Any:
        """The next batch in new containers, because scripts remove entries.

        The tensors are new, too, if the script wrote into the old ones.
        """
        i = self._turn % len(self._batches)
        self._turn += 1
        if i in self._spare and _versions(self._batches[i]) != self._versions[i]:
            return _rebuilt(self._spare[i], lambda tensor: tensor.clone())
        return _rebuilt(self._batches[i], lambda tensor: tensor)


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not context.loaders:
        return Skip("the script prepares its batches without a DataLoader")
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    caches = _CACHES.setdefault(context, {})
    # iterator -> backward passes so far, and its batches since the last one
    streaks: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    def evaluates(iterator: Any) -> bool:
        backwards, count = streaks.get(iterator, (context.backwards, 0))
        streaks[iterator] = context.backwards, count + 1 if backwards == context.backwards else 0
        return streaks[iterator][1] > MAX_BATCHES_WITHOUT_BACKWARD

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def next_cached(iterator: Any) -> Any:
            if context.paused or not context.torch.is_grad_enabled():
                return original(iterator)
            cached = caches.get(id(iterator._dataset))
            if cached is None:
                cached = caches[id(iterator._dataset)] = CachedBatches(iterator._dataset)
            if cached.full:
                return original(iterator) if evaluates(iterator) else cached.next_batch()
            batch = original(iterator)
            cached.add(batch)
            return batch

        return next_cached

    wrap_loader_method(context.torch, "batch", wrap, ledger)
    return ledger.restore


def _rebuilt(batch: object, copied: Callable[[Any], Any]) -> Any:
    """The same batch in new containers, with each tensor mapped by ``copied``."""

    def rebuilt_leaf(leaf: Any) -> Any:
        if hasattr(leaf, "untyped_storage"):
            return copied(leaf)
        return copy.copy(leaf) if hasattr(leaf, "__dict__") else leaf

    return mapped(batch, rebuilt_leaf)


def _versions(batch: object) -> list[int]:
    return [tensor._version for tensor in tensors_in(batch)]


def _bytes(batch: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))


def code(value: Value) -> str:
    return "batch = next(iter(loader))\nwhile True: ...  # train on this one batch, to see the step time without the loader"


LEVER = Lever(
    "loader",
    Moment.STEP,
    Effect.CHANGES_MATH,
    applies,
    code,
    apply=apply,
    live=True,
    warms_up=True,
    page=__doc__,
)
