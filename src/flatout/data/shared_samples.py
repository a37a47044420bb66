"""Shares the kept samples of one program of a search with later programs, which saves seconds of fetching.

A file holds the columns of a store. Its name depends on the shape of the samples and on the samples that were
proved. A different data set, or a seed that changes one of these samples, uses a different file.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from flatout.data.source import spread
from flatout.data.store import TESTED_SAMPLES, Store

CHECKED_SAMPLES = 256  # samples that are fetched again and compared before a file is used
MAX_FILE_BYTES = 2**30  # largest size of a file
FREE_SPACE_FACTOR = 4  # the disk must have this many times the file's size free


class SharedSamples:
    """Files opened in the context ``untracked`` do not count as the program's. ``clock`` returns seconds."""

    def __init__(
        self, folder: Path, untracked: Callable[[], AbstractContextManager[None]], clock: Callable[[], float]
    ) -> None:
        self.folder = folder
        self.fetch_s = 0.0  # time to fetch all samples, saved by a program that finds a file
        self._untracked, self._clock = untracked, clock

    def fill(self, store: Store, holds: Callable[[int], bool], fetch: Callable[[], None]) -> None:
        """Fill the store from a file, or by ``fetch`` and then write the file.

        ``holds`` fetches a sample again and returns whether the store has the same.
        """
        path = self._file(store)
        if path is None:
            fetch()
        elif not self._restore(store, path, holds):
            start_s = self._clock()
            fetch()
            if self._save(store, path):
                self.fetch_s += self._clock() - start_s

    def _restore(self, store: Store, path: Path, holds: Callable[[int], bool]) -> bool:
        size = sum(map(len, map(octets, store.columns)))
        with self._untracked():
            if not path.is_file() or path.stat().st_size != size:  # truncated
                return False
            content, offset = torch.from_file(str(path), size=size, dtype=torch.uint8), 0
            for column in map(octets, store.columns):
                column.copy_(content[offset : offset + len(column)])
                offset += len(column)
        store.filled.fill_(True)
        if all(holds(index) for index in spread(store.rows, CHECKED_SAMPLES)):
            return True
        store.filled.fill_(False)  # including earlier rows: the file may have replaced them
        return False

    def _save(self, store: Store, path: Path) -> bool:
        if store.bytes > MAX_FILE_BYTES or not store.full:
            return False
        part = path.with_suffix(f".{os.getpid()}")
        with self._untracked():
            try:
                if shutil.disk_usage(self.folder).free < FREE_SPACE_FACTOR * store.bytes:
                    return False
                with part.open("wb") as file:
                    for column in store.columns:
                        file.write(memory_of(column))
                os.replace(part, path)
            except OSError:
                part.unlink(missing_ok=True)
                return False
        return True

    def _file(self, store: Store) -> Path | None:
        if store.rows < store.length or not store.bytes:
            return None
        digest = hashlib.blake2b(repr((store.template, store.length)).encode(), digest_size=16)
        for column in store.columns:
            rows = column[spread(store.length, TESTED_SAMPLES)]
            digest.update(memory_of(rows))
        return self.folder / f"{digest.hexdigest()}.samples"


def memory_of(column: Tensor) -> memoryview:
    """The memory of a column, without NumPy. It does not keep the column alive."""
    return memoryview((ctypes.c_char * column.nbytes).from_address(column.data_ptr()))


def octets(column: Tensor) -> Tensor:
    """The bytes of a column, [n], sharing its memory."""
    return column.view(-1).view(torch.uint8)
