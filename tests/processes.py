"""Processes as a test sees them: a program that succeeds, whether one lives, its state, its folder, and waiting for a condition."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import hang_s
from warm import start_program

NOT_PASSED_ON = ("FLATOUT_", "PYTEST_", "MALLOC_", "KMP_", "RANK", "WORLD_SIZE", "MASTER_")


def run_python(*words, limit_s=150.0, **options):
    """The output of a Python program, which must succeed: a fork of the warm process where that can be."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
    command = [sys.executable, *map(str, words)]
    with start_program(command, {**kept, "OMP_NUM_THREADS": "1"}, **options) as process:
        try:
            out, err = process.communicate(timeout=hang_s(limit_s))
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, err[-4000:]
    return out


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
