"""The search on a real program, under conditions that a small test program does not create by itself."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
from limits import hang_s

from flatout.tune.goal import Goal
from flatout.tune.search import search
from flatout.tune.tuning import Tuning, Watcher

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(180), pytest.mark.processes]

BUDGET_S = 25.0


class Crowded(Watcher):
    """Finds, after observing the program, that memory has no room for a second one."""

    tuning: Tuning

    def stage(self, name, detail=""):
        if name != "observing":
            self.tuning.max_copies = 1


@contextmanager
def counted(running):
    """How many programs run at once, sampled a hundred times a second."""
    seen = set()
    done = threading.Event()

    def look_again():
        while not done.wait(0.01):
            seen.add(len(running))

    thread = threading.Thread(target=look_again)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


@pytest.mark.full
def test_where_two_programs_do_not_fit_into_memory_only_one_runs(new_tuning, tiny, monkeypatch):
    monkeypatch.setenv("STEPS", "1000000")
    watcher = Crowded()
    watcher.tuning = new_tuning(tiny, Goal(BUDGET_S), watcher=watcher)
    with counted(watcher.tuning.interleaver.running) as seen:
        found = search(watcher.tuning)
    assert max(seen) == 1
    assert [
        comparison.n for comparison in found.comparisons if comparison.how == "fresh pairs"
    ] or found.speedup is None
    assert (found.baseline.step_ms or 0.0) > 0
    assert found.spent_s < hang_s(3 * BUDGET_S)  # a machine that is busy has longer blocks
