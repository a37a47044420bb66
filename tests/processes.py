"""Processes as a test sees them: whether one lives, its state, its folder, and waiting for a condition."""

import contextlib
import socket
import time
from pathlib import Path

import pytest
from limits import hang_s


def until(condition, seconds=20.0):
    end = time.monotonic() + hang_s(seconds)
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


@contextlib.contextmanager
def working_in(folder):
    """contextlib.chdir, which Python 3.10 lacks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])
