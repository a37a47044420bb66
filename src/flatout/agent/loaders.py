"""DataLoaders: finds them as they are made, applies rules, feeds batches, and reports batches."""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

from flatout.agent.frames import place_of, user_line
from flatout.agent.loader_methods import wrap_loader_method
from flatout.schema.program import Ledger, TrainingContext

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.dataloader import _BaseDataLoaderIter

Function = Callable[..., Any]
MAX_LENGTH = 2**40  # limit: endless samplers report a huge length

LoaderRule = Callable[[Any, "dict[str, Any]"], "dict[str, Any]"]
"""Chooses arguments of a DataLoader that is being made: ``rule(dataset, arguments) -> arguments``."""

FeedRule = Callable[[Any, "dict[str, Any]", Any], Any]
"""Chooses how the batches of a DataLoader are made, per iterator: ``rule(loader, asked, feed) -> feed``.

``asked``: the arguments with which the script made the loader. ``feed``: the choice of earlier rules, None at
first. ``feed.begin(iterator)`` returns a replacement for the data set, or None for no replacement.
``feed.collate`` collates what the replacement fetches.
"""


class Loaders:
    """Records the arguments that the script passed to each DataLoader, and the arguments that it got."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.rules: list[LoaderRule] = []
        self.feed_rules: list[FeedRule] = []
        self.descriptions: list[dict[str, Any]] = []
        # loader -> its position in ``descriptions``
        self.positions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.script_args: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        # loader -> position of the first one made with equal arguments
        self.first_alike: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._position_of_key: dict[tuple[Any, ...], int] = {}
        self._first_positions: list[int] = []
        # position in ``descriptions`` -> backward passes after a batch of this loader
        self.backward_counts: Counter[int] = Counter()
        # iterator -> its loader's position in ``descriptions``
        self._iterator_positions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._last_position: int | None = None  # the loader of the last batch
        self._feeds: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._dataset: Callable[[], Any] | None = None
        self._made_persistent: WeakSet[Any] = WeakSet()

    def observe_creation(self, ledger: Ledger) -> None:
        """Wrap ``DataLoader.__init__``: persistent workers and the batch size cannot be changed later."""
        wrap_loader_method(self.torch, "making", self._wrap_init, ledger)
        self._keep_epoch_draw(ledger)
        self._feed_iterators(ledger)

    def _wrap_init(self, init: Function) -> Function:
        signature = inspect.signature(init)

        def hooked_init(loader: DataLoader, *args: object, **kwargs: object) -> None:
            try:
                bound = signature.bind(loader, *args, **kwargs)
            except TypeError:
                init(loader, *args, **kwargs)  # an invalid call: let torch raise its own error
                return
            script_args = dict(list(bound.arguments.items())[1:])
            changed = self._apply_rules(script_args)
            if changed == script_args:
                init(loader, *args, **kwargs)
            else:
                init(loader, **changed)
            self._note(loader, script_args, changed, place_of(user_line(sys._getframe(1))))

        return hooked_init

    def _apply_rules(self, script_args: dict[str, Any]) -> dict[str, Any]:
        changed = dict(script_args)
        for rule in self.rules:
            changed = rule(script_args.get("dataset"), changed)
        return changed

    def _note(
        self, loader: DataLoader, script_args: dict[str, Any], changed: dict[str, Any], place: Any = None
    ) -> None:
        dataset = script_args.get("dataset")
        self.script_args[loader] = script_args
        if self._dataset is None and is_map_style(dataset):
            self._dataset = weak_getter(dataset)
        if changed.get("persistent_workers") and not script_args.get("persistent_workers"):
            self._made_persistent.add(loader)
        self.positions[loader] = len(self.descriptions)
        self.first_alike[loader] = first = self._position_of_key.setdefault(
            loader_key(dataset, script_args), len(self.descriptions)
        )
        self._first_positions.append(first)
        self.descriptions.append(
            {
                **describe(loader, dataset, script_args),
                "place": place.to_json() if place is not None else None,
            }
        )

    def register(self, loader: DataLoader) -> None:
        """Register a DataLoader that was made before flatout attached. Other objects are ignored."""
        if isinstance(loader, self.torch.utils.data.DataLoader):
            script_args = arguments_of(loader, self.torch)
            self._note(loader, script_args, script_args)

    def rebuild(self, loader: DataLoader, ledger: Ledger) -> Any:
        """Return the DataLoader rebuilt according to the rules; feeds act on it from here on."""
        if loader not in self.script_args:
            return loader
        if self.rules or self.feed_rules:
            self._keep_epoch_draw(ledger)
            self._feed_iterators(ledger)
        script_args = self.script_args[loader]
        changed = self._apply_rules(script_args)
        # a subclass has its own arguments
        if changed == script_args or type(loader) is not self.torch.utils.data.DataLoader:
            return loader
        rebuilt = type(loader)(**changed)
        del self.script_args[loader]
        self.descriptions.clear()
        self._first_positions.clear()
        self._position_of_key.clear()
        self._note(rebuilt, script_args, changed)
        return rebuilt

    def _keep_epoch_draw(self, ledger: Ledger) -> None:
        """Keep drawing one seed per epoch: persistent workers draw none, which would shift later draws."""
        torch = self.torch

        def wrap(reset: Function) -> Function:
            def hooked_reset(iterator: object, loader: DataLoader, first_iter: bool = False) -> None:
                if not first_iter and loader in self._made_persistent:
                    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
                reset(iterator, loader, first_iter)

            return hooked_reset

        wrap_loader_method(torch, "next epoch", wrap, ledger)

    def add_feed_rule(self, rule: FeedRule) -> Callable[[], None]:
        """Feed iterators that are created from now on by this rule; return the function that ends it."""
        self.feed_rules.append(rule)

        def end() -> None:
            self.feed_rules.remove(rule)
            self._feeds.clear()

        return end

    def _feed_iterators(self, ledger: Ledger) -> None:
        wrap_loader_method(self.torch, "iterator", self._wrap_iterator_init, ledger)

    def _wrap_iterator_init(self, init: Function) -> Function:
        def init_fed(iterator: _BaseDataLoaderIter, loader: DataLoader) -> None:
            init(iterator, loader)
            if loader in self.positions:  # a subclass may make its iterator without `__iter__`
                self._iterator_positions[iterator] = self.positions[loader]
            feed = self._feeds.get(loader)
            for rule in self.feed_rules:
                feed = rule(loader, self.script_args.get(loader, {}), feed)
            if feed is not None and self.feed_rules:
                self._feeds[loader] = feed
                source = feed.begin(iterator)
                if source is not None:
                    iterator._dataset, iterator._collate_fn = source, feed.collate

        return init_fed

    def observe_batches(self, ledger: Ledger, context: TrainingContext) -> None:
        """Report batches while gradients are enabled, as evaluation usually disables them, and epochs."""

        def wrap_batch(original_next: Function) -> Function:
            def hooked_next(iterator: object) -> Any:
                if context.paused or not context.torch.is_grad_enabled():
                    return original_next(iterator)
                context.listener.data_begin(iterator)
                batch = original_next(iterator)
                self._last_position = self._iterator_positions.get(iterator)
                context.listener.data_end(iterator, batch)
                return batch

            return hooked_next

        def wrap_epoch(original_iter: Function) -> Function:
            def hooked_iter(loader: DataLoader) -> Any:
                if context.paused:
                    return original_iter(loader)
                context.listener.iterator_begin(loader)
                iterator = original_iter(loader)
                if loader in self.positions:
                    self._iterator_positions[iterator] = self.positions[loader]
                    if not loader.persistent_workers:  # such loaders hold their iterator
                        # `for batch in DataLoader(...)` holds only the iterator
                        iterator.flatout_loader = loader
                context.listener.iterator_end(loader, iterator)
                return iterator

            return hooked_iter

        wrap_loader_method(self.torch, "batch", wrap_batch, ledger)
        wrap_loader_method(self.torch, "epoch", wrap_epoch, ledger)

    def backward_begins(self) -> None:
        """Count the loader of the last batch as training.

        An evaluation with gradients enabled is followed by another batch before the next backward pass.
        """
        if self._last_position is not None:
            self.backward_counts[self._last_position] += 1
            self._last_position = None

    def first_like(self, position: int) -> int:
        return self._first_positions[position]

    def data_is_random(self) -> bool:
        """Whether fetching a sample of the first map-style data set draws random numbers; True if unknown."""
        dataset = self._dataset() if self._dataset is not None else None
        return dataset is None or draws_random_numbers(dataset, self.torch)


def draws_random_numbers(dataset: Dataset, torch: ModuleType) -> bool:
    """Whether fetching a sample draws random numbers or gives another result when repeated.

    Fetches two samples twice, and restores the generators.
    """
    numpy = sys.modules.get("numpy")
    before: Any = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        for index in (0, 1):
            # e.g. a generator of its own, copied into each worker
            if not _equal(dataset[index], dataset[index]):
                return True
        has_drawn = not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
        if numpy is not None:
            now = numpy.random.get_state()
            has_drawn = has_drawn or now[2] != before[2][2] or not (now[1] == before[2][1]).all()
        return bool(has_drawn)
    except Exception:
        return True  # unknown counts as random
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if hasattr(a, "shape") and hasattr(a, "tolist"):  # tensors and arrays
        return a is b or repr(a.tolist()) == repr(b.tolist())
    return a is b or hasattr(a, "getbands") or type(a).__eq__ is object.__eq__ or bool(a == b)  # type: ignore[comparison-overlap]


def arguments_of(loader: DataLoader, torch: ModuleType) -> dict[str, Any]:
    """Return the arguments to rebuild this DataLoader, without the samplers that it made for itself."""
    data = torch.utils.data
    arguments: dict[str, Any] = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if type(batch_sampler) is not data.BatchSampler and batch_sampler is not None:
        arguments["batch_sampler"] = batch_sampler
    else:
        arguments["batch_size"], arguments["drop_last"] = loader.batch_size, loader.drop_last
        own_shuffle = (
            type(sampler) is data.RandomSampler and not sampler.replacement and sampler._num_samples is None
        )
        if own_shuffle and sampler.generator is loader.generator:
            arguments["shuffle"] = True
        elif type(sampler) is not data.SequentialSampler and is_map_style(loader.dataset):
            arguments["sampler"] = sampler
    defaults = {
        "num_workers": 0,
        "pin_memory": False,
        "timeout": 0,
        "worker_init_fn": None,
        "generator": None,
        "persistent_workers": False,
        "pin_memory_device": "",
        "in_order": True,
        "multiprocessing_context": None,
    }
    arguments.update(
        {
            name: value
            for name, default in defaults.items()
            if (value := getattr(loader, name, default)) != default
        }
    )
    if loader.num_workers and loader.prefetch_factor is not None:
        arguments["prefetch_factor"] = loader.prefetch_factor
    return arguments


def loader_key(dataset: Dataset, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key of loaders that the script treats as one, e.g. a new one for each epoch."""
    plain = [
        arguments.get(name, default)
        for name, default in (("batch_size", 1), ("shuffle", None), ("drop_last", False), ("num_workers", 0))
    ]
    return (
        type(dataset),
        _length(dataset),
        *plain,
        type(arguments.get("sampler")),
        type(arguments.get("batch_sampler")),
    )


def weak_getter(thing: object) -> Callable[[], Any]:
    try:
        return ref(thing)
    except TypeError:  # e.g. a list: hold it strongly
        return lambda: thing


def describe(loader: DataLoader, dataset: Dataset, script_args: dict[str, Any]) -> dict[str, Any]:
    length = _length(dataset)
    return {
        "dataset": type(dataset).__name__,
        "length": length if length is None or length < MAX_LENGTH else None,
        "batch_size": loader.batch_size
        if loader.batch_size is not None
        else getattr(loader.batch_sampler, "batch_size", None),
        "num_workers": loader.num_workers,
        "asked_workers": script_args.get("num_workers", 0),
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "prefetch_factor": loader.prefetch_factor,
        "iterable": not is_map_style(dataset),
    }


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None


def is_map_style(dataset: Dataset) -> bool:
    """Whether samples are fetched by index; an IterableDataset inherits a raising ``__getitem__``."""
    return hasattr(dataset, "__getitem__") and not any(
        kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__
    )
