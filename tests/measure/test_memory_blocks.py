"""Memory blocks: the peak is the true one for any allocations, and its parts add up to it."""

from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.batch_curve import RESOLUTION, largest_that_fits
from flatout.measure.memory_blocks import MemoryBlockTracker

ACTS = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 5000), st.sampled_from(["parameters", "temporary", "activations"])
    ),
    max_size=80,
)


@given(ACTS, ACTS, st.sampled_from([1, 512]))
def test_the_peak_is_the_maximum_of_live_memory(before, after, rounding):
    blocks, living, highest, fullest = MemoryBlockTracker(rounding), [], 0, 0
    for acts in (before, after):
        blocks.reset_peak()
        highest = blocks.in_use_bytes
        fullest = sum(block.size_bytes for block in living if block.kind == "activations")
        for takes, number, kind in acts:
            if takes or not living:
                living.append(blocks.allocate(number, kind, "net"))
            else:
                blocks.free(living.pop(number % len(living)))
            highest = max(highest, sum(block.size_bytes for block in living))
            fullest = max(fullest, sum(block.size_bytes for block in living if block.kind == "activations"))
    assert all(block.size_bytes % rounding == 0 for block in living)
    peak = blocks.peak()
    assert peak.peak_bytes == highest == sum(peak.kinds.values())
    assert sum(peak.by_module.values()) == fullest
    assert blocks.in_use_bytes == sum(block.size_bytes for block in living)


def test_blocks_that_outlive_a_forward_pass_are_activations():
    blocks = MemoryBlockTracker()
    weight = blocks.allocate(100, "parameters")
    before = blocks.allocate(7)
    entered = blocks.events
    kept, passing = blocks.allocate(10, module="conv"), blocks.allocate(20, module="conv")
    blocks.free(passing)
    blocks.classify_survivors("activations", entered)
    assert (weight.kind, before.kind, kept.kind, passing.kind) == (
        "parameters",
        "temporary",
        "activations",
        "temporary",
    )
    blocks.free(kept)
    blocks.free(kept)  # a storage is freed only once
    assert blocks.in_use_bytes == 107
    assert blocks.peak().by_module == {"conv": 10}


LINES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), min_size=1, max_size=5)


@given(LINES, st.integers(0, 10**8), st.integers(1, 5000), st.integers(1, 10**6))
def test_the_largest_that_fits(lines, limit, start, most):
    """A peak is the maximum of several straight lines: moments of a step."""
    asked = []

    def peak_of(size):
        assert 1 <= size <= most
        asked.append(size)
        return max(fixed + each * size for fixed, each in lines)

    found = largest_that_fits(peak_of, limit, start, most)
    assert found == 0 or (found in asked and peak_of(found) <= limit)
    assert found == most or peak_of(min(most, found + max(1, found // RESOLUTION))) > limit
    assert len(asked) < 60
