"""Lists folders without files that the script made in the first run and has not made again yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from flatout.agent.ledger import Ledger
from flatout.agent.overlay import Overlay

os_scandir = os.scandir


class Listings:
    """Patches folder listings. ``overlay``: knows which files do not exist yet."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    def install(self, ledger: Ledger) -> None:
        ledger.set(os, "listdir", self._listed(os.listdir))
        ledger.set(os, "scandir", lambda path=".": Entries(self, os_scandir(path), path))

    def _listed(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def listdir(path: object = None) -> Any:
            return [name for name in really(path) if not self.hides(path, name)]

        return listdir

    def hides(self, folder: Any, name: Any) -> bool:
        if isinstance(folder, int) or isinstance(name, bytes) or not self.overlay.moved or self.overlay.busy:
            return False
        key = self.overlay.key(os.path.join(os.fspath(folder or "."), name))
        return key in self.overlay.moved and self.overlay.moved[key] is None


class Entries:
    """Replaces `os.scandir`."""

    def __init__(self, listings: Listings, entries: Any, folder: Any) -> None:
        self.listings, self.entries, self.folder = listings, entries, folder

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        while self.listings.hides(self.folder, (entry := next(self.entries)).name):
            pass
        return entry

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def close(self) -> None:
        self.entries.close()
