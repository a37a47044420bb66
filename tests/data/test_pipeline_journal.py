"""The random numbers of deferred calls are those of the same calls made one by one, whatever their order and
kind.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.draws import NumberSource
from flatout.data.journal import DrawJournal, numbers_of
from flatout.data.operation import ImageShape, draw_row, rows_to_columns
from flatout.data.operations import Flip, Pad, Window
from flatout.data.resample import ResizedCrop, TensorResampler

SHAPE = ImageShape(3, 11, 13)
CROP = ResizedCrop(TensorResampler("bilinear", True, False), 6, 6, (0.1, 2.0), (0.75, 1.33))
KINDS = [
    (Pad(1, 1, 1, 1), Window(8, 9), Flip(-1, 0.5)),
    (Flip(-1, 0.3),),
    (Window(6, 6, separate_axes=True), Flip(-2, 0.5), Flip(-1, 0.5)),
    (CROP, Flip(-1, 0.5)),
    (CROP,),
]
calls = st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=12)


def plain(order, seed):
    generator = torch.Generator().manual_seed(seed)
    return [draw_row(KINDS[kind], SHAPE, NumberSource(generator)) for kind in order], generator.get_state()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


@settings(max_examples=120)
@given(
    pattern=calls,
    repeated=st.integers(1, 5),
    draw_now=st.booleans(),
    pick=st.randoms(use_true_random=False),
    seed=st.integers(0, 999),
)
def test_numbers_are_those_of_the_calls_one_by_one(pattern, repeated, draw_now, pick, seed):
    order = pattern * repeated
    rows, end = plain(order, seed)
    torch.manual_seed(seed)
    journal = DrawJournal(draw_now)
    draws = [journal.add(KINDS[kind], SHAPE) for kind in order]
    journal.draw_pending()
    assert journal.in_order
    assert torch.equal(torch.get_rng_state(), end)
    for kind in set(order):
        mine = [at for at, each in enumerate(order) if each == kind]
        pick.shuffle(mine)
        taken = mine[: pick.randint(1, len(mine))]
        assert same(
            numbers_of([draws[at] for at in taken]),
            rows_to_columns(KINDS[kind], [rows[at] for at in taken], SHAPE),
        )


def test_a_random_number_in_between_is_detected():
    for between in (lambda: torch.rand(1), lambda: torch.manual_seed(3)):
        journal = DrawJournal(draw_now=False)
        journal.add(KINDS[0], SHAPE)
        between()
        journal.draw_pending()
        assert not journal.in_order


def test_a_random_number_before_the_first_call_does_not_count():
    journal = DrawJournal(draw_now=False)
    torch.rand(1)
    journal.add(KINDS[0], SHAPE)
    journal.add(KINDS[0], SHAPE)
    journal.draw_pending()
    torch.rand(1)
    journal.add(KINDS[0], SHAPE)
    journal.draw_pending()
    assert journal.in_order


def test_seeding_interrupts_a_pending_call():
    journal = DrawJournal(draw_now=False)
    journal.interrupt()
    assert journal.in_order
    journal.add(KINDS[0], SHAPE)
    journal.interrupt()
    journal.draw_pending()
    assert not journal.in_order
    draw_now = DrawJournal(draw_now=True)
    draw_now.add(KINDS[0], SHAPE)
    draw_now.interrupt()
    assert draw_now.in_order
