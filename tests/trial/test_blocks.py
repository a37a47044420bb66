"""The length of a block of ticks, and into how many slices it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from flatout.trial.blocks import BLOCK_MS, MAX_TICKS, SLICE_MS, BlockTimer

TICK_MS = st.floats(0.01, 5000.0)


def timer(tick_ms, **fields):
    made = BlockTimer()
    made.tick_ms = tick_ms
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@given(TICK_MS)
def test_slices_are_short_and_hold_at_least_a_tick(tick_ms):
    made = timer(tick_ms)
    assert 1 <= made.slices <= made.block_ticks <= MAX_TICKS
    assert made.block_s * 1000 / made.slices <= 1.001 * max(1.5 * SLICE_MS, tick_ms)
    assert made.block_s * 1000 <= 1.001 * max(BLOCK_MS + tick_ms / 2, tick_ms)


@given(TICK_MS, st.integers(1, 30))
def test_a_block_is_whole_where_a_pause_changes_the_speed(tick_ms, ahead):
    """Loader workers fetch batches during a pause; ranks wait for each other after it."""
    made = timer(tick_ms, prefetched_ticks=ahead)
    assert made.slices == 1
    assert tick_ms >= 500 or made.block_ticks >= min(2 * ahead, MAX_TICKS)
    assert timer(tick_ms, settle_ticks=1 + ahead).slices == 1
