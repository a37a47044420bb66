"""Runs a function in a fork of the program: what it draws, prints and changes stays there."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

from flatout.measure.clock import seconds

LIMIT_S = 3.0


def in_fork(function: Callable[[], Any]) -> Any:
    """What a function returns in a fork, as JSON; None if it fails or takes too long."""
    if sys.platform != "linux":
        return None
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads are running
        child = os.fork()
    if not child:
        nothing = io.StringIO()
        with suppress(BaseException), redirect_stdout(nothing), redirect_stderr(nothing):
            os.write(write, json.dumps(function()).encode())
        os._exit(0)
    os.close(write)
    answer, end_s = b"", seconds() + LIMIT_S
    while select.select([read], [], [], max(0.0, end_s - seconds()))[0] and (part := os.read(read, 65536)):
        answer += part
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with suppress(ValueError):
        return json.loads(answer)
    return None
