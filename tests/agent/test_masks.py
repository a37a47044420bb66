"""Indexing by a mask is observed, and torch is restored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.agent.ledger import Ledger
from flatout.agent.synchronisations import has_mask, observe_masks

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

MASK = torch.arange(3) > 0
ONE = st.sampled_from(
    [
        0,
        slice(None),
        slice(1, 3),
        None,
        Ellipsis,
        torch.tensor(1),
        torch.tensor([0, 2]),
        [0, 2],
        numpy.array([1, 0]),
        True,
        MASK,
        MASK.numpy(),
        MASK.to(torch.uint8),
        [True, False, True],
    ]
)


def test_torch_is_restored():  # the first: older torch allows one hook at a time
    ledger, found = Ledger(), []
    observe_masks(torch, ledger, lambda really, mask, frame: found.append(mask) or really())
    assert ledger.entries() == ["aten::index"]
    ledger.restore()
    assert torch.ones(3)[MASK].shape == (2,)
    assert not found


@pytest.fixture(scope="module")
def observed():
    ledger, found = Ledger(), []
    observe_masks(torch, ledger, lambda really, mask, frame: found.append(frame.f_code.co_name) or really())
    yield found
    ledger.restore()


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@given(index=st.one_of(ONE, st.tuples(ONE), st.tuples(ONE, ONE)))
def test_indexing_by_a_mask_is_observed(observed, index):
    observed.clear()
    try:
        torch.ones(3, 3)[index]
    except IndexError:  # of no tensor of this shape
        return
    assert observed == ["test_indexing_by_a_mask_is_observed"] * has_mask(index)


def test_the_result_equals_torchs(observed):
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    picked = x[x > 2]
    picked.square().sum().backward()
    assert picked.tolist() == [3.0, 4.0, 5.0]
    assert x.grad.tolist() == [[0.0, 0.0], [0.0, 6.0], [8.0, 10.0]]


def test_a_loss_is_no_sequence(observed):
    loss = torch.ones(2).sum()
    assert torch.tensor([loss, 2 * loss]).tolist() == [2.0, 4.0]
    assert loss.new_tensor([[loss], [loss]]).tolist() == [[2.0], [2.0]]
