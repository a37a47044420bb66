import os
import threading

import pytest

from flatout.measure.cores import current_core, move_to

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores on Linux",
)


def on_a_thread(work):
    """Run it on a thread of its own, so that the affinity of the tests' thread stays."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_moves_and_may_move_on():
    allowed = os.sched_getaffinity(0)

    def visit():
        arrived = []
        for core in sorted(allowed)[:2] * 20:
            move_to(core)
            arrived.append(current_core() == core)
        return sum(arrived), os.sched_getaffinity(0)

    arrived, after = on_a_thread(visit)
    assert arrived >= 36  # the system may move it on at once
    assert after == allowed


def test_a_bound_thread_stays():
    first, second = sorted(os.sched_getaffinity(0))[:2]

    def visit():
        os.sched_setaffinity(0, {first})
        move_to(second)
        return current_core(), os.sched_getaffinity(0)

    assert on_a_thread(visit) == (first, {first})


def test_an_unknown_core_changes_nothing():
    allowed = os.sched_getaffinity(0)
    assert on_a_thread(lambda: (move_to(10**6), os.sched_getaffinity(0))[1]) == allowed
