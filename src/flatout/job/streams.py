"""The standard streams of a process of flatout, whose caller may have closed them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def open_closed_streams() -> None:
    """Open the closed ones of this process. They are not inheritable: a program starts as without flatout."""
    sys.stdin = sys.stdin or _null_stream("r")
    sys.stdout = sys.stdout or _null_stream("w")
    sys.stderr = sys.stderr or _null_stream("w")


def _null_stream(mode: str) -> Any:
    return os.fdopen(os.open(os.devnull, os.O_RDWR), mode)


@contextmanager
def avoid_closed_streams() -> Iterator[None]:
    """Inside, no new file gets the number of a closed standard stream: the program would write into it."""
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    while fillers[-1] <= 2:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        for filler in fillers:
            os.close(filler)
