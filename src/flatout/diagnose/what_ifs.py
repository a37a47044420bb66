"""What-if bounds: how fast the step would be without one cost.

They change the maths on purpose, only inside a trial. Each is a Lever that is switched on and off between blocks of
steps of the running program. None is ever part of a Plan. `TABLE` is in display order.
"""

from __future__ import annotations

import builtins
import copy
import gc
import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flatout.agent.loader_methods import wrap_loader_method
from flatout.guard.suspended_optimizer import suspend_optimizer
from flatout.measure.nests import mapped, tensors_in
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

    from flatout.schema.program import Ledger, TrainingContext

MAX_CACHED_BATCHES = 4  # batches per loader: lengths may differ from batch to batch
MAX_BATCHES_WITHOUT_BACKWARD = 32  # of an iterator; more are an evaluation
MAX_SPARE_BYTES = 2**30  # no spare copy is kept beyond this size

# context -> data set -> batches, kept across switches
_CACHES: WeakKeyDictionary[Any, dict[int, CachedBatches]] = WeakKeyDictionary()


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

        The tensors are new, too, if the script wrote into the old ones."""
        i = self._turn % len(self._batches)
        self._turn += 1
        if i in self._spare and _versions(self._batches[i]) != self._versions[i]:
            return _rebuilt(self._spare[i], lambda tensor: tensor.clone())
        return _rebuilt(self._batches[i], lambda tensor: tensor)


def _has_loaders(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not context.loaders:
        return Skip("the script prepares its batches without a DataLoader")
    return Options((True,))


def _batches_ready(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """What if batches were ready in advance? The same few batches are reused.

    The first batches of each loader are cached. While the what-if is active, the loader's iterator returns them
    in rotation. Evaluation gets its own batches as usual, so that it ends: gradients are off, or many batches pass
    without a backward pass. Afterwards the real iterator continues from its position."""
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


MAX_CACHED_COPIES = 256  # different copies; further ones, for example moved parameters, are real copies


def _has_device(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.device_type == "cpu":
        return Skip("the program trains on the CPU, so no batch is copied to a device")
    return Options((True,))


def _batches_on_device(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """What if every batch were on the device already?

    One cached device tensor replaces every copy of its shape, dtype and place in the script."""
    tensor_class = context.torch.Tensor
    cache: dict[tuple[Any, ...], Any] = {}

    def cached(original: Callable[..., Any]) -> Any:
        def move(tensor: Tensor, *args: object, **kwargs: object) -> Any:
            if tensor.device.type != "cpu" or tensor.requires_grad or not context.torch.is_grad_enabled():
                return original(tensor, *args, **kwargs)
            caller = sys._getframe(1)
            key = (
                caller.f_code,
                caller.f_lasti,
                tuple(tensor.shape),
                tensor.dtype,
                repr(args),
                repr(sorted(kwargs.items(), key=lambda item: item[0])),
            )
            if key in cache:
                return cache[key].detach()
            moved = original(tensor, *args, **kwargs)
            if moved.device.type != "cpu" and len(cache) < MAX_CACHED_COPIES:
                cache[key] = moved
            return moved

        return move

    ledger.set(tensor_class, "to", cached(tensor_class.to))
    ledger.set(tensor_class, "cuda", cached(tensor_class.cuda))
    return ledger.restore


def _has_optimizers(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not context.optimizers:
        return Skip("the script updates its parameters without an optimizer object")
    if context.closure_steps and context.backwards_in_last_step > 1:
        return Skip(
            "the optimizer runs forward and backward several times within one step; there is no step without it"
        )
    return Options((True,))


def _no_update(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """What if the parameter update cost nothing?"""
    for optimizer in context.optimizers:
        suspend_optimizer(context.torch, optimizer, ledger)
    return ledger.restore


READ_METHODS = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy")
MAX_STALE_READS = 1000  # times within one step, at one place


def _stale_values(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """What if Python never waited for a tensor? item() and similar calls return their previous value.

    A stale value is wrong but good enough for a bound. A stale value that controls a loop could keep it running
    forever, so a place that reads very often within one step gets a real value again. The option "floats"
    excludes integers, which are often lengths."""
    torch = context.torch
    previous: dict[Any, Any] = {}
    reads: Counter[Any] = Counter()
    step = [context.steps]

    def stale(original: Callable[..., Any]) -> Any:
        def read(tensor: Tensor, *args: object, **kwargs: object) -> Any:
            # a parameter: it is saved or averaged, not read
            if tensor.requires_grad and tensor.grad_fn is None:
                return original(tensor, *args, **kwargs)
            if context.device_type != "cpu" and tensor.device.type == "cpu":
                return original(tensor, *args, **kwargs)
            if value == "floats" and not (tensor.dtype.is_floating_point or tensor.dtype == torch.bool):
                return original(tensor, *args, **kwargs)
            if step[0] != context.steps:
                step[0] = context.steps
                reads.clear()
            caller = sys._getframe(1)
            key = (caller.f_code, caller.f_lasti, tuple(tensor.shape), tensor.dtype)
            reads[key] += 1
            if key not in previous or reads[key] > MAX_STALE_READS:
                previous[key] = original(tensor, *args, **kwargs)
            return list(previous[key]) if isinstance(previous[key], list) else previous[key]

        return read

    for name in READ_METHODS:
        ledger.set(torch.Tensor, name, stale(getattr(torch.Tensor, name)))
    if context.device_type == "cuda":
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            ledger.set(owner, "synchronize", lambda *args, **kwargs: None)
    return ledger.restore


# module (if loaded), owner of the methods, prefixes of the methods that write
WRITERS = (
    ("torch.utils.tensorboard.writer", "SummaryWriter", ("add_",)),
    ("tensorboardX", "SummaryWriter", ("add_",)),
    ("tqdm.std", "tqdm", ("display",)),
    ("wandb", "", ("log",)),
    ("mlflow", "", ("log_",)),
)


class _DiscardingStream:
    """A stream wrapper that discards writes and passes everything else on."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text)

    def writelines(self, lines: object) -> None:
        pass

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _no_messages(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """What if nothing were printed or logged? print, progress bars, loggers and metric writers are muted.

    The content of a message is still computed: the value of an f-string, the ``item()`` inside it."""
    ledger.set(builtins, "print", lambda *args, **kwargs: None)
    for name in ("stdout", "stderr"):
        ledger.set(sys, name, _DiscardingStream(getattr(sys, name)))
    previous_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    ledger.on_restore("logging.disable", lambda: logging.disable(previous_level))
    for module, owner, prefixes in WRITERS:
        target = sys.modules.get(module)
        target = getattr(target, owner, None) if owner else target
        for name in (
            [name for name in vars(target) if name.startswith(prefixes) and callable(getattr(target, name))]
            if target is not None
            else []
        ):
            ledger.set(target, name, lambda *args, **kwargs: None)
    return ledger.restore


def _collects_garbage(facts: Facts, context: TrainingContext) -> Options | Skip:
    return Options((True,)) if gc.isenabled() else Skip("the script has already disabled garbage collection")


def _no_collection(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """What if Python never ran the garbage collector?"""
    if gc.isenabled():
        gc.disable()
        ledger.on_restore("gc.disable", gc.enable)
    return ledger.restore


def _fewer_threads(facts: Facts, context: TrainingContext) -> Options | Skip:
    threads = context.torch.get_num_threads()
    # If there are more threads than cores, try one thread per core.
    return (
        Options((min(threads - 1, facts.cores),))
        if threads > 1
        else Skip("the program already uses one thread")
    )


def _more_threads(facts: Facts, context: TrainingContext) -> Options | Skip:
    threads = context.torch.get_num_threads()
    return (
        Options((threads + 1,))
        if threads < facts.cores
        else Skip(f"the program already uses all {facts.cores} cores")
    )


def _set_threads(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """What if operations used one thread fewer, or one more?"""
    threads = context.torch.get_num_threads()
    context.torch.set_num_threads(int(value))  # type: ignore[arg-type]
    ledger.on_restore("torch.set_num_threads", lambda: context.torch.set_num_threads(threads))
    return ledger.restore


def _offers(*values: Value) -> Callable[[Facts, Any], Options]:
    return lambda facts, context: Options(values)


TABLE: tuple[Lever, ...] = tuple(
    Lever(
        name,
        Moment.STEP,
        Effect.CHANGES_MATH,
        applies,
        apply=apply,
        live=True,
        warms_up=apply is _batches_ready,
        sets_threads=apply is _set_threads,
    )
    for name, applies, apply in (
        ("loader", _has_loaders, _batches_ready),
        ("copies", _has_device, _batches_on_device),
        ("optimizer", _has_optimizers, _no_update),
        ("syncs", _offers("all", "floats"), _stale_values),
        ("logging", _offers(True), _no_messages),
        ("gc", _collects_garbage, _no_collection),
        ("one thread fewer", _fewer_threads, _set_threads),
        ("one thread more", _more_threads, _set_threads),
    )
)
