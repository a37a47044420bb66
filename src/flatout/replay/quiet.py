"""Keeps a program from printing again what it has printed already."""

from __future__ import annotations

import sys

from flatout.capture.ledger import Ledger


class Quiet:
    """Until `ends`."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                self._ledger.set(stream, "write", len, new=True)
                self._ledger.set(stream, "writelines", lambda lines: None, new=True)

    def ends(self) -> None:
        self._ledger.restore()
