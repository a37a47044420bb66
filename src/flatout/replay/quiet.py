"""Keeps a program from doing again what it has done already: printing, and writing files."""

from __future__ import annotations

import sys
from typing import Any

import torch

from flatout.capture.ledger import Ledger

SAVING = ((torch, "save"), (torch.jit, "save"))


class Quiet:
    """Until `ends`. ``shows``: what it prints is shown all the same."""

    def __init__(self, shows: bool) -> None:
        self.ledger = ledger = Ledger()
        if not shows:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    ledger.set(stream, "write", len, new=True)
                    ledger.set(stream, "writelines", lambda lines: None, new=True)
        for owner, name in SAVING:
            ledger.set(owner, name, _not_again)

    def ends(self) -> None:
        self.ledger.restore()


def _not_again(*args: Any, **kwargs: Any) -> None:
    """In the place of a function whose effect is there already."""
