"""Prepare batches ahead of time in a thread of this process.

The script's own thread still draws the indices and makes the first batch. The thread makes later batches only
if the first one moved no random generator. So the random draws of the model and of the data keep their order.
In each process, only one thread at a time fetches samples, because data sets share open files and caches.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from flatout.data.streams import same_states, states

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

_ONE_AT_A_TIME = threading.RLock()


class BatchPrefetcher:
    """Replaces ``_next_data`` of a single-process iterator. ``depth`` batches are ready or in progress.

    ``own`` holds the random generators of the data set.
    """

    def __init__(
        self, iterator: _BaseDataLoaderIter, depth: int, say: Callable[[str], None], own: Sequence[Any] = ()
    ) -> None:
        self._iterator = weakref.ref(iterator)
        self._plain = type(iterator)._next_data
        self._depth = depth
        self._say = say
        self._own = own
        self._ready: deque[tuple[Any, Future[Any]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._started = self._ended = False
        weakref.finalize(iterator, _leave, self._ready)

    def __call__(self) -> Any:
        iterator: Any = self._iterator()
        if not self._started:
            self._started = True
            return self._first(iterator)
        while self._pool is not None and len(self._ready) < self._depth and not self._ended:
            try:
                index = iterator._next_index()
            except StopIteration:
                self._ended = True
                break
            self._ready.append((index, self._pool.submit(_fetched, iterator._dataset_fetcher, index)))
        if self._ready:
            return self._finished(iterator, self._taken(iterator))
        if self._pool is None:
            with _ONE_AT_A_TIME:
                return self._plain(iterator)
        self._pool.shutdown(wait=False)
        raise StopIteration

    @property
    def works(self) -> bool:
        """Return whether the thread makes the batches."""
        return self._pool is not None

    def _first(self, iterator: _BaseDataLoaderIter) -> Any:
        index = iterator._next_index()  # a sampler draws its order at the first request
        before = states(self._own)
        batch = self._finished(iterator, _fetched(iterator._dataset_fetcher, index))
        if same_states(before, states(self._own)):
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches ahead")
        else:
            self._say("fetching a sample draws random numbers, and a second thread would change their order")
        return batch

    def _taken(self, iterator: _BaseDataLoaderIter) -> Any:
        """Return the next batch. If the thread failed, make the batch here, with the error of a plain run."""
        index, future = self._ready.popleft()
        if self._pool is not None:
            try:
                return future.result()
            except Exception as error:
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = None
                self._say(
                    f"batches are no longer prepared ahead: {type(error).__name__} in the thread that prepares them"
                )
        elif not future.cancelled() and future.exception() is None:
            return future.result()
        return _fetched(iterator._dataset_fetcher, index)

    @staticmethod
    def _finished(iterator: _BaseDataLoaderIter, batch: Any) -> Any:
        if not iterator._pin_memory:
            return batch
        from torch.utils.data._utils.pin_memory import pin_memory

        return pin_memory(batch, iterator._pin_memory_device)


def _fetched(fetcher: Any, index: object) -> Any:
    with _ONE_AT_A_TIME:
        return fetcher.fetch(index)


def _leave(ready: deque[tuple[Any, Future[Any]]]) -> None:
    """Cancel the batches that have not started: the script left its loop early."""
    for _, future in ready:
        future.cancel()
