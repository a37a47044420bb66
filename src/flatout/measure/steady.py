"""Detect the end of a program's warm-up: allocator, caches, compiler and loader workers have settled."""

from collections.abc import Sequence

from flatout.measure.statistics import median

WINDOW = 4
TOLERANCE = 0.15
LONGEST_WARMUP_TICKS = 30
LONGEST_WARMUP_S = 20.0
LONG_TICK_MS, LONGEST_TICK_MS = 1000.0, 2000.0


def is_steady(ticks_ms: Sequence[float], elapsed_s: float, fewest_ticks: int = 1) -> bool:
    """Return True once two successive windows of four ticks have medians within 15 %, or after a timeout.

    ``ticks_ms`` are all ticks after the first step, ``elapsed_s`` the time since the first step. A program
    with a tick of a second needs two ticks, with a longer tick one: a longer warm-up would cost more than it
    could correct. ``fewest_ticks`` must pass even after the timeout, because the first tick under a compiler
    is the compilation.
    """
    if len(ticks_ms) < max(1, fewest_ticks):
        return False
    if elapsed_s >= LONGEST_WARMUP_S or len(ticks_ms) >= LONGEST_WARMUP_TICKS:
        return True
    if ticks_ms[-1] >= LONGEST_TICK_MS:
        return True
    if ticks_ms[-1] >= LONG_TICK_MS and len(ticks_ms) >= 2:
        return ticks_ms[-1] <= 1.3 * ticks_ms[-2] and ticks_ms[-2] <= 1.3 * ticks_ms[-1]
    if len(ticks_ms) < 2 * WINDOW:
        return False
    before, now = median(ticks_ms[-2 * WINDOW : -WINDOW]), median(ticks_ms[-WINDOW:])
    return abs(now - before) <= TOLERANCE * max(now, before)
