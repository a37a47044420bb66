"""Random numbers of a batch are those of one call after another, and the generator ends in the state after
those calls.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.draws import Integer, Uniform, columns, understood

WIDEST = 2**28  # from here on, torch.randint takes two words
kinds = st.one_of(st.builds(Integer, st.integers(1, WIDEST - 1)), st.just(Uniform()))
seeds = st.integers(0, 2**32)


def two(seed, before=0):
    found = [torch.Generator().manual_seed(seed) for _ in range(2)]
    for generator in found:  # an odd position in the stream, and a normal number whose second half is pending
        for _ in range(before):
            torch.rand(1, generator=generator)
    return found


@given(seeds, st.lists(kinds, max_size=5), st.integers(0, 9), st.integers(0, 3))
def test_columns_are_one_call_after_another(seed, listed, rows, before):
    bulk, single = two(seed, before)
    together = columns(listed, rows, bulk)
    one_by_one = [[kind.draw(single) for kind in listed] for _ in range(rows)]
    assert len(together) == len(listed)
    for at in range(len(listed)):
        for row in range(rows):
            assert together[at][row].item() == one_by_one[row][at].item()
            assert together[at].dtype == one_by_one[row][at].dtype
    assert torch.equal(bulk.get_state(), single.get_state())


def test_the_default_generator():
    torch.manual_seed(8)
    found = columns([Uniform(), Integer(7)], 3)
    torch.manual_seed(8)
    assert [(a.item(), b.item()) for a, b in zip(*found, strict=True)] == [
        (torch.rand(1).item(), torch.randint(0, 7, (1,)).item()) for _ in range(3)
    ]


def test_this_torch_is_understood():
    assert understood()
