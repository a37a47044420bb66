"""Limits against hanging. A slow machine stretches them, so that no test fails because of its speed."""

import os
import subprocess
import sys
import time
from statistics import median

VARIABLE = "SLOWNESS_OF_TESTS"
START_S = 0.02  # of `python -c pass`, on the machine that the limits are written for


def slowness():
    """How many times as long as there a Python takes to start here, at least 1. The session measures it once, for all of its processes."""
    if VARIABLE not in os.environ:
        starts = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            starts.append(time.perf_counter() - began)
        os.environ[VARIABLE] = f"{max(1.0, median(starts) / START_S):.2f}"
    return float(os.environ[VARIABLE])


def hang_s(seconds):
    """A limit for what ends by itself well within `seconds`."""
    return seconds * slowness()
