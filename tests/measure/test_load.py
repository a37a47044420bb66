"""The load of the machine from other processes, and its remaining capacity."""

import multiprocessing
import os

import pytest

from flatout.measure.load import busy_cores, copies_that_fit, peak_bytes


def spin(stop):
    while not stop.is_set():
        pass


def test_a_busy_process_is_seen():
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    other_process = context.Process(target=spin, args=(stop,))
    other_process.start()
    try:
        busy = busy_cores(1.0)
    finally:
        stop.set()
        other_process.join()
    assert busy is not None
    assert 0.3 < busy <= (os.cpu_count() or 1) + 0.5


def test_memory_limits_how_many_fit():
    torch = pytest.importorskip("torch")
    alone = copies_that_fit(torch, torch.device("cpu"))
    assert alone >= 2  # a small test process, on any machine that runs a test suite
    assert copies_that_fit(torch, torch.device("cpu"), processes=10**9) == 1
    ballast = bytearray(os.urandom(4096)) * (256 * 1024)  # a GiB: fewer of what is larger
    assert len(ballast) == 2**30
    assert copies_that_fit(torch, torch.device("cpu")) < alone
    assert peak_bytes(torch, torch.device("cpu")) > 2**30
