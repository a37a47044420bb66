"""Batches that a thread of this process makes ready ahead of time.

Indices are still drawn by the script's own thread, and the first batch is made there too: only where that moved no random generator,
later ones are made beside it. So what the model draws and what the data draws can never trade places.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from flatout.pipeline.streams import same_states, states


class Ahead:
    """Stands in the place of a single-process iterator's ``_next_data``. ``depth`` batches are ready or being made."""

    def __init__(self, iterator: Any, depth: int, say: Callable[[str], None]) -> None:
        self._iterator = weakref.ref(iterator)
        self._plain = type(iterator)._next_data
        self._depth = depth
        self._say = say
        self._ready: deque[Future[Any]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._started = self._ended = False
        weakref.finalize(iterator, _leave, self._ready)

    def __call__(self) -> Any:
        iterator: Any = self._iterator()
        if not self._started:
            self._started = True
            index = iterator._next_index()  # a sampler draws its order when it is first asked
            drawn = states()
            batch = self._finished(iterator, iterator._dataset_fetcher.fetch(index))
            if same_states(drawn, states()):
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches ahead")
            else:
                self._say("fetching a sample draws random numbers, whose order a second thread would change")
            return batch
        if self._pool is None:
            return self._plain(iterator)
        while len(self._ready) < self._depth and not self._ended:
            try:
                index = iterator._next_index()
            except StopIteration:
                self._ended = True
                break
            self._ready.append(self._pool.submit(iterator._dataset_fetcher.fetch, index))
        if not self._ready:
            self._pool.shutdown(wait=False)
            raise StopIteration
        return self._finished(iterator, self._ready.popleft().result())

    @staticmethod
    def _finished(iterator: Any, batch: Any) -> Any:
        if not iterator._pin_memory:
            return batch
        from torch.utils.data._utils.pin_memory import pin_memory

        return pin_memory(batch, iterator._pin_memory_device)


def _leave(ready: deque[Future[Any]]) -> None:
    """The script has left its loop before the end: what was not begun is not made any more."""
    for future in ready:
        future.cancel()
