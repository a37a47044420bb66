"""Random numbers of a batch are those of one call after another, and the generator ends in the state after
those calls.
"""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.data.draws import (
    BulkNumberSource,
    Integer,
    NumberSource,
    Uniform,
    draw_columns,
    matches_torch,
)

WIDEST = 2**28  # from here on, torch.randint takes two words
finite = st.floats(-1e4, 1e4, allow_nan=False, width=32)
kinds = st.one_of(
    st.builds(lambda a, b: Uniform(min(a, b), max(a, b)), finite, finite),
    st.builds(Integer, st.integers(1, WIDEST - 1)),
    st.just(Uniform()),
)
seeds = st.integers(0, 2**32)


def two(seed, before=0):
    found = [torch.Generator().manual_seed(seed) for _ in range(2)]
    for generator in found:  # an odd position in the stream, and a normal number whose second half is pending
        for _ in range(before):
            torch.rand(1, generator=generator)
    return found


@given(seeds, st.lists(kinds, max_size=5), st.integers(0, 9), st.integers(0, 3))
@example(0, [Uniform(1e-43, 3.0), Uniform()], 3, 1)  # a tie, but for the 1e-43
def test_columns_are_one_call_after_another(seed, listed, rows, before):
    bulk, single = two(seed, before)
    together = draw_columns(listed, rows, bulk)
    one_by_one = [[kind.draw(single) for kind in listed] for _ in range(rows)]
    assert len(together) == len(listed)
    for at in range(len(listed)):
        for row in range(rows):
            assert together[at][row].item() == one_by_one[row][at].item()
            assert together[at].dtype == one_by_one[row][at].dtype
    assert torch.equal(bulk.get_state(), single.get_state())


calls = st.one_of(
    st.builds(lambda a, b: ("uniform", min(a, b), max(a, b)), finite, finite),
    st.builds(
        lambda low, more: ("randint", low, low + more), st.integers(-50, 50), st.integers(1, WIDEST - 1)
    ),
    st.builds(lambda kind: ("draw", kind), kinds),
)


@given(seeds, st.lists(calls, max_size=90))
@example(0, [("uniform", 1e-43, 3.0)] * 9)
def test_words_are_numbers(seed, asked):
    """This holds for any request in any order."""
    ahead, single = two(seed)
    numbers, found = NumberSource(single), []

    def answers(numbers):
        found.extend(getattr(numbers, name)(*arguments) for name, *arguments in asked)
        return found[:]

    wanted = answers(numbers)
    found.clear()
    with BulkNumberSource(ahead) as words:
        assert answers(words) == wanted
    assert torch.equal(ahead.get_state(), single.get_state())


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 127, 128, 129, 700])
def test_the_generator_ends_in_the_state_after_the_calls(count):
    ahead, single = two(3)
    with BulkNumberSource(ahead) as words:
        for _ in range(count):
            words.uniform(0.0, 1.0)
    for _ in range(count):
        torch.rand(1, generator=single)
    assert torch.equal(ahead.get_state(), single.get_state())


def test_the_generator_is_restored_where_the_reading_fails():
    ahead, single = two(4)

    def fail():
        with BulkNumberSource(ahead) as words:
            words.uniform(0.0, 1.0)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    torch.rand(1, generator=single)
    assert torch.equal(ahead.get_state(), single.get_state())


def test_the_default_generator():
    torch.manual_seed(8)
    found = draw_columns([Uniform(), Integer(7)], 3), NumberSource().uniform(0.0, 1.0)
    torch.manual_seed(8)
    wanted = (
        [(torch.rand(1).item(), torch.randint(0, 7, (1,)).item()) for _ in range(3)],
        torch.rand(1).item(),
    )
    assert [(a.item(), b.item()) for a, b in zip(*found[0], strict=True)] == wanted[0]
    assert found[1] == wanted[1]


def test_this_torch_is_understood():
    assert matches_torch()


@pytest.mark.parametrize(
    ("low", "high"),
    [(math.log(3 / 4), math.log(4 / 3)), (0.08, 1.0), (-180.0, 180.0), (0.6, 1.4), (-0.1, 0.1), (1e-6, 1e6)],
)
def test_no_rounding_anywhere(low, high):
    """torchvision's bounds of random numbers, many times."""
    bulk, single = two(11)
    together = draw_columns([Uniform(low, high)], 4001, bulk)[0]
    assert torch.equal(
        together,
        torch.stack([torch.empty(1).uniform_(low, high, generator=single) for _ in range(4001)])[:, 0],
    )
