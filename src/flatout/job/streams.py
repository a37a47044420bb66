"""The standard streams of a process of flatout, whose caller may have closed them."""

from __future__ import annotations

import os
import sys
from typing import Any


def open_closed_streams() -> None:
    """Open the closed ones of this process. They are not inheritable: a program starts as without flatout."""
    sys.stdin = sys.stdin or _null_stream("r")
    sys.stdout = sys.stdout or _null_stream("w")
    sys.stderr = sys.stderr or _null_stream("w")


def _null_stream(mode: str) -> Any:
    return os.fdopen(os.open(os.devnull, os.O_RDWR), mode)
