"""Re-execute the current process from the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn


def reexecute(more: Mapping[str, str]) -> NoReturn:
    """Run the same Python command again, with ``more`` added to its environment.

    Only the process ID and inheritable open files survive."""
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **more})
