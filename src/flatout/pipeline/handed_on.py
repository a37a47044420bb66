"""Samples that one program of a search has kept, for the programs that are started after it: to fetch them all again takes seconds each time.

A file holds the columns of a store. Its name follows from the shape of the samples and from those that proved that they may be kept, so another
data set or another seed that changes one of these has another file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from flatout.pipeline.keeping import PROVED, spread
from flatout.pipeline.store import Store

CHECKED = 256  # samples that are fetched again and compared before those of a file are used
MOST_BYTES = 2**30  # of one file
SPARE = 4  # the disk keeps this many times the file free


class HandedOn:
    """``unseen``: files that are opened meanwhile are none of the program's. ``clock``: seconds."""

    def __init__(self, folder: Path, unseen: Callable[[], AbstractContextManager[None]], clock: Callable[[], float]) -> None:
        self.folder = folder
        self.filled_s = 0.0  # what fetching all samples took here, which a program that finds a file is spared
        self._unseen, self._clock = unseen, clock

    def fill(self, store: Store, holds: Callable[[int], bool], fetch: Callable[[], None]) -> None:
        """Fill the store from a file; or by ``fetch``, and then write the file. ``holds`` fetches a sample again and answers whether the store has the same."""
        path = self._file(store)
        if path is None:
            fetch()
        elif not self._restored(store, path, holds):
            start_s = self._clock()
            fetch()
            if self._saved(store, path):
                self.filled_s += self._clock() - start_s

    def _restored(self, store: Store, path: Path, holds: Callable[[int], bool]) -> bool:
        bytes_ = sum(map(len, map(octets, store.columns)))
        with self._unseen():
            if not path.is_file() or path.stat().st_size != bytes_:  # cut off
                return False
            found, at = torch.from_file(str(path), size=bytes_, dtype=torch.uint8), 0
            for column in map(octets, store.columns):
                column.copy_(found[at:at + len(column)])
                at += len(column)
        store.filled.fill_(True)
        if all(holds(index) for index in spread(store.rows, CHECKED)):
            return True
        store.filled.fill_(False)  # also of those that were there before: some may be the file's
        return False

    def _saved(self, store: Store, path: Path) -> bool:
        """False where the store is too large, or cannot be written."""
        if store.bytes > MOST_BYTES or not store.full:
            return False
        part = path.with_suffix(f".{os.getpid()}")
        with self._unseen():
            try:
                if shutil.disk_usage(self.folder).free < SPARE * store.bytes:
                    return False
                with part.open("wb") as file:
                    for column in store.columns:
                        file.write(memoryview(octets(column).numpy()))
                os.replace(part, path)
            except OSError:
                part.unlink(missing_ok=True)
                return False
        return True

    def _file(self, store: Store) -> Path | None:
        """None for a store that lies on disk, or has no row for every sample."""
        if store.rows < store.length or not store.bytes:
            return None
        digest = hashlib.blake2b(repr((store.template, store.length)).encode(), digest_size=16)
        for column in store.columns:
            digest.update(octets(column[spread(store.length, PROVED)]).numpy())
        return self.folder / f"{digest.hexdigest()}.samples"


def octets(column: Tensor) -> Tensor:
    """Its bytes, [n], in the same memory."""
    return column.view(-1).view(torch.uint8)
