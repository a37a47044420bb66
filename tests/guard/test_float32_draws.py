"""A float64 model draws the random numbers of its float32 copy, and torch's own operators do not."""

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from flatout.guard.float32_draws import float32_draws  # noqa: E402

X = torch.linspace(-2, 2, 3000).reshape(3, 1000)
DRAWS = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "dropout": lambda x: F.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "everything dropped": lambda x: torch.native_dropout(x, 1.0, True)[0],
    "evaluation": lambda x: torch.native_dropout(x, 0.3, False)[0],
    "gumbel": F.gumbel_softmax,
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(torch.sigmoid(x)),
    "normal": lambda x: torch.normal(x, 1.0),
    "distribution": lambda x: torch.distributions.Normal(x, torch.ones_like(x)).rsample(),
    "multinomial": lambda x: torch.multinomial(torch.sigmoid(x), 5),
    "attention": lambda x: F.scaled_dot_product_attention(*3 * (x.view(1, 3, 10, 100),), dropout_p=0.2),
}


@pytest.mark.parametrize("name", DRAWS)
def test_float64_draws_what_float32_draws(name):
    torch.manual_seed(0)
    plain = DRAWS[name](X)
    torch.manual_seed(0)
    with float32_draws(torch):
        double = DRAWS[name](X.double())
    assert double.dtype is (torch.float64 if plain.is_floating_point() else plain.dtype)
    assert torch.allclose(double.double(), plain.double(), atol=1e-5)


def test_without_it_some_draws_differ():
    """Otherwise the test above would show nothing."""
    torch.manual_seed(0)
    plain = torch.randn_like(X)
    torch.manual_seed(0)
    assert not torch.allclose(torch.randn_like(X.double()), plain.double(), atol=1e-2)


def test_gradients_pass_through_dropout_in_float64():
    x = X.double().requires_grad_()
    torch.manual_seed(0)
    with float32_draws(torch):
        (torch.native_dropout(x, 0.3, True)[0] * torch.randn_like(x)).sum().backward()
    again = X.clone().requires_grad_()
    torch.manual_seed(0)
    (torch.native_dropout(again, 0.3, True)[0] * torch.randn_like(again)).sum().backward()
    assert x.grad.dtype is torch.float64
    assert torch.allclose(x.grad, again.grad.double(), atol=1e-5)
