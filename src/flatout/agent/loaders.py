"""Tracks DataLoaders: finds them as they are made, applies rules, feeds batches, and reports batches."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import place_of, users_line
from flatout.agent.loader_arguments import (
    arguments_of,
    describe,
    draws_random_numbers,
    is_map_style,
    way_of,
    weakly,
)
from flatout.schema.program import Ledger, TrainingContext

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter


class LoaderRule:
    """Chooses arguments of a DataLoader that is being made: ``change(dataset, arguments) -> arguments``."""

    def __init__(self, change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
        self.change = change


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
        self.seen: list[dict[str, Any]] = []
        # loader -> its position in ``seen``
        self.number: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.alive: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )  # loader -> what the script asked for
        # loader -> position of the first one made with equal arguments
        self.alike: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ways: dict[tuple[Any, ...], int] = {}
        self._first: list[int] = []
        # position in ``seen`` -> backward passes after a batch of this loader
        self.fed: Counter[int] = Counter()
        # iterator -> its loader's position in ``seen``
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._last: int | None = None  # the loader of the last batch
        self._feeds: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._dataset: Callable[[], Any] | None = None
        self._made_persistent: weakref.WeakSet[Any] = weakref.WeakSet()

    def observe_making(self, ledger: Ledger) -> None:
        """Wrap ``DataLoader.__init__``: persistent workers and the batch size cannot be changed later."""
        loader_class = self.torch.utils.data.DataLoader
        init = loader_class.__init__
        signature = inspect.signature(init)

        @wraps(init)
        def hooked_init(loader: DataLoader, *args: object, **kwargs: object) -> None:
            try:
                bound = signature.bind(loader, *args, **kwargs)
            except TypeError:
                init(loader, *args, **kwargs)  # an invalid call: let torch raise its own error
                return
            asked = dict(list(bound.arguments.items())[1:])
            changed = self._changed(asked)
            if changed == asked:
                init(loader, *args, **kwargs)
            else:
                init(loader, **changed)
            self._note(loader, asked, changed, place_of(users_line(sys._getframe(1))))

        ledger.set(loader_class, "__init__", hooked_init)
        self._keep_the_draw(ledger)
        self._feed_iterators(ledger)

    def _changed(self, asked: dict[str, Any]) -> dict[str, Any]:
        changed = dict(asked)
        for rule in self.rules:
            changed = rule.change(asked.get("dataset"), changed)
        return changed

    def _note(
        self, loader: DataLoader, asked: dict[str, Any], changed: dict[str, Any], place: Any = None
    ) -> None:
        dataset = asked.get("dataset")
        self.alive[loader] = asked
        if self._dataset is None and is_map_style(dataset):
            self._dataset = weakly(dataset)
        if changed.get("persistent_workers") and not asked.get("persistent_workers"):
            self._made_persistent.add(loader)
        self.number[loader] = len(self.seen)
        self.alike[loader] = first = self._ways.setdefault(way_of(dataset, asked), len(self.seen))
        self._first.append(first)
        self.seen.append(
            {**describe(loader, dataset, asked), "place": place.to_json() if place is not None else None}
        )

    def meet(self, loader: DataLoader) -> None:
        """Register a DataLoader that was made before flatout attached. Other objects are ignored."""
        if isinstance(loader, self.torch.utils.data.DataLoader):
            asked = arguments_of(loader, self.torch)
            self._note(loader, asked, asked)

    def made_again(self, loader: DataLoader, ledger: Ledger) -> Any:
        """Return the DataLoader rebuilt according to the rules; feeds act on it from here on."""
        if loader not in self.alive:
            return loader
        if self.rules or self.feed_rules:
            self._keep_the_draw(ledger)
            self._feed_iterators(ledger)
        asked = self.alive[loader]
        changed = self._changed(asked)
        # a subclass has its own arguments
        if changed == asked or type(loader) is not self.torch.utils.data.DataLoader:
            return loader
        other = type(loader)(**changed)
        del self.alive[loader]
        self.seen.clear()
        self._first.clear()
        self._ways.clear()
        self._note(other, asked, changed)
        return other

    def _keep_the_draw(self, ledger: Ledger) -> None:
        """Keep drawing one seed per epoch: persistent workers draw none, which would shift later draws."""
        torch, iterator_class = self.torch, self.torch.utils.data.dataloader._MultiProcessingDataLoaderIter
        reset = iterator_class._reset

        @wraps(reset)
        def hooked_reset(iterator: object, loader: DataLoader, first_iter: bool = False) -> None:
            if not first_iter and loader in self._made_persistent:
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            reset(iterator, loader, first_iter)

        ledger.set(iterator_class, "_reset", hooked_reset)

    def feed_by(self, rule: FeedRule) -> Callable[[], None]:
        """Feed iterators that are created from now on by this rule; return the function that ends it."""
        self.feed_rules.append(rule)

        def end() -> None:
            self.feed_rules.remove(rule)
            self._feeds.clear()

        return end

    def _feed_iterators(self, ledger: Ledger) -> None:
        """Wrap the creation of an iterator, where both kinds of iterators take data set and collation."""
        iterator_class = self.torch.utils.data.dataloader._BaseDataLoaderIter
        init = iterator_class.__init__

        @wraps(init)
        def init_fed(iterator: _BaseDataLoaderIter, loader: DataLoader) -> None:
            init(iterator, loader)
            if loader in self.number:  # a subclass may make its iterator without `__iter__`
                self._numbers[iterator] = self.number[loader]
            feed = self._feeds.get(loader)
            for rule in self.feed_rules:
                feed = rule(loader, self.alive.get(loader, {}), feed)
            if feed is not None and self.feed_rules:
                self._feeds[loader] = feed
                source = feed.begin(iterator)
                if source is not None:
                    iterator._dataset, iterator._collate_fn = source, feed.collate

        ledger.set(iterator_class, "__init__", init_fed)

    def observe_batches(self, ledger: Ledger, context: TrainingContext) -> None:
        """Wrap the fetch of a batch while gradients are enabled: evaluation usually disables them."""
        iterator_class = self.torch.utils.data.dataloader._BaseDataLoaderIter
        take = iterator_class.__next__

        @wraps(take)
        def hooked_next(iterator: object) -> Any:
            if context.asleep or not context.torch.is_grad_enabled():
                return take(iterator)
            context.listener.data_begin(iterator)
            batch = take(iterator)
            self._last = self._numbers.get(iterator)
            context.listener.data_end(iterator, batch)
            return batch

        ledger.set(iterator_class, "__next__", hooked_next)
        self._observe_iterators(ledger, context)

    def _observe_iterators(self, ledger: Ledger, context: TrainingContext) -> None:
        """Wrap the start of an epoch, where workers start."""
        loader_class = self.torch.utils.data.DataLoader
        begin = loader_class.__iter__

        @wraps(begin)
        def hooked_iter(loader: DataLoader) -> Any:
            if context.asleep:
                return begin(loader)
            context.listener.iterator_begin(loader)
            iterator = begin(loader)
            if loader in self.number:
                self._numbers[iterator] = self.number[loader]
                if not loader.persistent_workers:  # such loaders hold their iterator
                    iterator.flatout_loader = loader  # `for batch in DataLoader(...)` holds only the iterator
            context.listener.iterator_end(loader, iterator)
            return iterator

        ledger.set(loader_class, "__iter__", hooked_iter)

    def backward_begins(self) -> None:
        """Count the loader of the last batch as training.

        An evaluation with gradients enabled is followed by another batch before the next backward pass.
        """
        if self._last is not None:
            self.fed[self._last] += 1
            self._last = None

    def first_like(self, number: int) -> int:
        """Return the position of the first loader made with equal arguments."""
        return self._first[number]

    def data_is_random(self) -> bool:
        """Whether fetching a sample of the first map-style data set draws random numbers; True if unknown."""
        dataset = self._dataset() if self._dataset is not None else None
        return dataset is None or draws_random_numbers(dataset, self.torch)
