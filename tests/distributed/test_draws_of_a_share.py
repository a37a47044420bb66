"""A rank uses the random numbers that one process uses for its samples, wherever in a tensor the
samples are.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from flatout.distributed.batches import draw_for_whole_batch, share  # noqa: E402

functional = torch.nn.functional
# name -> (dimension of the samples, entries per sample there, the operation for n samples)
DRAWS = {
    "noise": (0, 1, lambda n: torch.randn(n, 5)),
    "noise like a tensor": (0, 1, lambda n: torch.randn_like(torch.zeros(n, 19, 2))),
    "time steps": (0, 1, lambda n: torch.randint(0, 1000, (n,))),
    "dropout": (0, 1, lambda n: functional.dropout(torch.ones(n, 40), 0.4)),
    "dropout of a sequence first": (1, 1, lambda n: functional.dropout(torch.ones(17, n, 23), 0.4)),
    "dropout of heads": (0, 4, lambda n: functional.dropout(torch.ones(n * 4, 19, 19), 0.4)),
    "a gate": (0, 1, lambda n: torch.bernoulli(torch.full((n, 6), 0.3))),
    "in place": (0, 1, lambda n: torch.empty(n, 7).normal_(2.0, 3.0)),
    "uniform in place": (0, 1, lambda n: torch.empty(n, 7, dtype=torch.float64).uniform_()),
    "around means": (0, 1, lambda n: torch.normal(torch.zeros(n, 4), torch.ones(n, 4))),
}


@pytest.mark.parametrize("name", DRAWS)
@given(samples=st.integers(4, 13), world=st.integers(2, 3), seed=st.integers(0, 99))
def test_a_share_gets_the_random_numbers_of_the_whole(name, samples, world, seed):
    dim, each, draw = DRAWS[name]
    torch.manual_seed(seed)
    whole, after = draw(samples), torch.rand(3)
    for rank in range(world):
        part = share(samples, rank, world)
        if part.size == 1 and each > 1:  # a share of one sample looks like any shape
            continue
        torch.manual_seed(seed)
        with draw_for_whole_batch(torch, lambda part=part: part):
            mine = draw(part.size)
        assert torch.equal(mine, whole.narrow(dim, part.start * each, part.size * each))
        assert torch.equal(torch.rand(3), after)  # the generator has advanced equally


def test_the_gradient_of_an_attention_is_that_of_the_whole():
    """Attention counts as an operator with random numbers.

    It returns its normalisers with its output, and its backward pass needs those of the share.
    """

    def gradients(q, k, v):
        q, k, v = (each.detach().clone().requires_grad_() for each in (q, k, v))
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
        return q.grad, k.grad, v.grad

    whole = torch.randn(3, 6, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = gradients(*whole)
    for rank in range(2):
        part = share(6, rank, 2)
        with draw_for_whole_batch(torch, lambda part=part: part):
            mine = gradients(*whole[:, part.start : part.stop])
        assert all(
            torch.allclose(a, b[part.start : part.stop], atol=1e-6)
            for a, b in zip(mine, expected, strict=True)
        )


def test_random_tensors_without_a_sample_dimension_are_unchanged():
    part = share(8, 1, 2)
    torch.manual_seed(0)
    plain = [torch.randperm(9), torch.randn(3, 7), torch.rand(())]
    torch.manual_seed(0)
    with draw_for_whole_batch(torch, lambda: part):
        drawn = [torch.randperm(9), torch.randn(3, 7), torch.rand(())]
    assert all(torch.equal(a, b) for a, b in zip(plain, drawn, strict=True))
