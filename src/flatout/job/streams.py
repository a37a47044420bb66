"""The standard streams of a process of flatout, whose caller may have closed them."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open the closed ones of this process. They are not inheritable: a program starts as without flatout."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
