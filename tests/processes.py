"""Processes as a test sees them: whether one lives, its state, and waiting for a condition."""

from __future__ import annotations

import time
from pathlib import Path


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
    return answer


def alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def state(number):
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
