"""Messages of a command on standard error."""

from __future__ import annotations

import sys

from flatout.job.sanitize import harmless


def say(sentence: str) -> None:
    sys.stderr.write(f"flatout: {harmless(sentence)}\n")
