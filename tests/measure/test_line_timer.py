"""Time by line: of called functions, of a function that was already running, and not while it is paused."""

import sys
from collections import Counter

from flatout.measure.line_timer import LineTimer


def ours(filename):
    return filename == __file__


def numbers(timer):
    """Nanoseconds by line of this file, counted from the first line of the function."""
    found = Counter()
    for (code, line), ns in timer.ns.items():
        found[line - code.co_firstlineno] += ns
    return found


def work(count):
    small = sum(range(10))
    large = sum(range(count))
    return small + large


def running(timer):
    with timer:
        timer.trace_running(sys._getframe())
        sum(range(10))
        sum(range(300_000))
        timer.paused = True
        sum(range(3_000_000))
        timer.paused = False
        sum(range(10))


def test_the_slow_line_of_a_function_that_is_called():
    with LineTimer(ours) as timer:
        work(300_000)
    ((line, ns),) = numbers(timer).most_common(1)
    assert line == 2
    assert ns > 0.5 * timer.ns.total()  # the rest is the machine's: another process may run in between


def test_a_function_that_was_already_running_is_measured_and_a_pause_is_not():
    timer = LineTimer(ours)
    running(timer)
    found = numbers(timer)
    assert found.most_common(1)[0][0] == 4
    assert found[6] < 0.5 * found[4], "work during the pause was counted"


def test_nothing_is_traced_afterwards():
    running(LineTimer(ours))
    assert sys.gettrace() is None or "LineTimer" not in repr(sys.gettrace())
    assert sys._getframe().f_trace is None
