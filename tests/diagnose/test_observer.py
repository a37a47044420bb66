"""The observer in programs that call torch in less usual ways."""

import textwrap

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

LATE = """\
import warnings
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.nn.utils.clip_grad import clip_grad_norm_ as clip_of_the_module

warnings.simplefilter("error")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    CALL
"""


@pytest.mark.parametrize(
    "call",
    [
        "clip_grad_norm_(model.parameters(), 0.01)",
        "clip_grad_norm_(parameters=model.parameters(), max_norm=0.01)",
        "clip_grad_norm_(list(model.parameters()), 0.01)",
        "clip_grad_norm_(filter(torch.is_tensor, model.parameters()), 0.01)",
        "clip_grad_norm_(dict(model.named_parameters()).values(), 0.01)",
        "clip_grad_norm_(model.weight, 0.01)",
        "clip_of_the_module(model.parameters(), 0.01)",
        "clip_grad_value_(model.parameters(), 0.001)",
    ],
)
def test_gradients_are_clipped_of_what_the_program_gives(observe, call):
    seen = observe(LATE.replace("CALL", call))
    assert (seen["error"], seen["failed"]) == ("", {})
    assert [(f["rule"], f["place"]["line"]) for f in seen["findings"]] == [("FL007", 13)]


def test_torch_still_warns_of_an_empty_generator_and_of_nothing_else(observe):
    empty = observe(LATE.replace("CALL", "clip_grad_norm_((p for p in ()), 1.0)"))
    assert "empty generator" in empty["error"]
    assert observe(LATE.replace("CALL", "clip_grad_norm_(iter(()), 1.0)"))["error"] == ""


def test_values_inside_of_a_transform_are_not_read(observe):
    """Meta-learning: the gradient of a loss in a vmap over tasks."""
    program = """
        import torch
        import torch.nn.functional as F
        from torch.func import functional_call, grad, vmap

        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters())

        def loss(weights, x, y):
            return F.cross_entropy(functional_call(model, weights, (x,)), y)

        def task(weights, x, y):
            gradients = grad(loss)(weights, x, y)
            return loss({name: w - 0.1 * gradients[name] for name, w in weights.items()}, x, y)

        for _ in range(10):
            x, y = torch.randn(6, 16, 8), torch.randint(0, 4, (6, 16))
            optimizer.zero_grad()
            vmap(task, (None, 0, 0))(dict(model.named_parameters()), x, y).mean().backward()
            optimizer.step()
    """
    seen = observe(textwrap.dedent(program))
    assert (seen["error"], seen["failed"], seen["findings"]) == ("", {}, [])
