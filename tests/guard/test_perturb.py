"""A program that is rounded on purpose: in every step, by the requested amount, and never in its loss or its
weights.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatout.agent.ledger import Ledger
from flatout.guard.perturb import perturb
from flatout.guard.resolution import significant_bits
from flatout.guard.verdict import HALF_PERTURBATION, PERTURBATION


def context_of(*roots):
    return SimpleNamespace(
        torch=torch,
        roots=list(roots),
        optimizers=[],
        parameters=[p for root in roots for p in root.parameters()],
    )


def most_bits(x):
    return max(significant_bits(float(v)) for v in x.detach().flatten())


class Task(nn.Module):
    """A root module with its own matrix that returns a loss together with an output."""

    def __init__(self):
        super().__init__()
        self.place, self.inner = nn.Parameter(torch.randn(1, 5)), nn.Linear(5, 7)

    def forward(self, x):
        y = self.inner(x + self.place)
        return y, y.square().mean()


@pytest.mark.parametrize(("share", "bits"), [(HALF_PERTURBATION, 8), (PERTURBATION, 20)])
def test_outputs_and_gradients_are_rounded_in_every_step_and_weights_and_losses_are_not(share, bits):
    torch.manual_seed(0)
    model = Task()
    before = [p.detach().clone() for p in model.parameters()]
    perturb(context_of(model), share, Ledger())
    for _ in range(2):
        output, loss = model(torch.randn(16, 5))
        assert most_bits(output) == bits
        assert significant_bits(loss.item()) > bits
        loss.backward()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_the_step_is_that_of_the_plain_program_up_to_the_share():
    torch.manual_seed(0)
    model, x = Task(), torch.randn(16, 5)
    plain = torch.autograd.grad(model(x)[1], list(model.parameters()))
    ledger = Ledger()
    perturb(context_of(model), HALF_PERTURBATION, ledger)
    rounded = torch.autograd.grad(model(x)[1], list(model.parameters()))
    assert all(
        0 < float((a - b).norm() / b.norm()) < 8 * HALF_PERTURBATION
        for a, b in zip(rounded, plain, strict=True)
    )
    ledger.restore()
    again = torch.autograd.grad(model(x)[1], list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))


def test_a_layer_that_fails_gets_its_weights_back():
    model = nn.Linear(5, 7)
    before = model.weight.detach().clone()
    perturb(context_of(model), HALF_PERTURBATION, Ledger())
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(3, 4))
    assert torch.equal(model.weight, before)


def test_layers_with_several_outputs_and_extreme_numbers_are_rounded_too():
    torch.manual_seed(0)
    model = nn.LSTM(4, 6)
    perturb(context_of(model), HALF_PERTURBATION, Ledger())
    output, (hidden, _) = model(torch.randn(3, 2, 4))
    assert most_bits(output) <= 8
    assert most_bits(hidden) <= 8
    wild = nn.Linear(1, 1, bias=False)
    perturb(context_of(wild), HALF_PERTURBATION, Ledger())
    assert wild(torch.tensor([[float("inf")]])).isinf().all()
    assert wild(torch.tensor([[float("nan")]])).isnan().all()


@pytest.mark.parametrize("called", [False, True])
def test_layers_whose_hooks_are_not_called_are_perturbed_once_after_a_step(called):
    """As in a script that compiles its step first."""
    model = nn.Linear(5, 7)
    context = context_of(model)
    context.optimizers = [torch.optim.SGD(model.parameters(), lr=0.0)]
    before = model.weight.detach().clone()
    perturb(context, HALF_PERTURBATION, Ledger())
    moved = []
    for _ in range(3):
        x = torch.randn(3, 5)
        output = model(x) if called else nn.functional.linear(x, model.weight, model.bias)
        output.square().mean().backward()
        context.optimizers[0].step()
        moved.append(model.weight.detach().clone())
    assert (0 < float((moved[0] - before).abs().max()) <= HALF_PERTURBATION) is not called
    assert torch.equal(moved[0], moved[2])


def test_without_a_layer_the_weights_are_perturbed_once():
    weights = torch.linspace(1, 2, 64).requires_grad_()
    context = SimpleNamespace(torch=torch, roots=[], optimizers=[], parameters=[weights])
    before = weights.detach().clone()
    perturb(context, PERTURBATION, Ledger())
    away = (weights.detach() - before).abs() / before
    assert 0 < float(away.max()) <= 2 * PERTURBATION
