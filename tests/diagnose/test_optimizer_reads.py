"""Reads of the device in the step of an own optimizer, on the marked lines only, and healthy twins."""

import pytest
from forms import TEXT, assert_found, cases, filled

from flatout.diagnose.check import check
from flatout.probe.program import ScriptProgram

HEAD = """
import math
import torch
from torch import nn
from torch.utils.data import DataLoader

device = torch.device("cuda")
"""
OPTIMIZER = """
class Own(torch.optim.Optimizer):
    def step(self, closure=None):
        self.total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)
        norm = torch.tensor([self.total], device=device)
        {once}

    def update(self, p, group):
        state = self.state[p]
        if len(state) == 0:
            state["step"], state["n"] = torch.tensor(0.0), 0
            state["first"] = torch.zeros_like(p)
        first, grad = state["first"], p.grad.flatten()
        {line}
        p.add_(grad, alpha=-group["lr"])
"""
FETCHED = {
    "a sum": "self.total += first.abs().sum().item()",
    "a condition": "if grad.norm() > group['limit']: grad.div_(2)",
}
NOT_FETCHED = {
    "a sum on the device": "self.total = self.total + first.abs().sum()",
    "now and then": "if state['n'] % 100 == 0: self.total = grad.norm().item()",
    "an error": "if grad.is_sparse: raise ValueError(grad.norm().item())",
}
SEARCH = """
class Search(torch.optim.Optimizer):
    def step(self, closure):
        for trial in range(20):
            loss = closure()
            for p in self.param_groups[0]["params"]:
                if p.grad.abs().max() < 1e-6:
                    return loss
"""
FORMS = {
    ("FL101", OPTIMIZER): {
        **{f"an optimizer reads {name}": f"{line}  # <-" for name, line in FETCHED.items()},
        "an optimizer reads once": {"once": "self.total = norm[0].item()  # <-"},
        **{f"an optimizer has {name}": line for name, line in NOT_FETCHED.items()},
    },
    ("FL101", TEXT): {"a line search": SEARCH},
}


@pytest.mark.parametrize(("code", "template", "given"), cases(FORMS))
def test_a_read_is_found_on_its_line(code, template, given):
    assert_found(HEAD, code, template, given)


def test_a_read_for_each_parameter_comes_before_one_in_each_step():
    given = {"line": "self.total += float(grad.norm())", "once": "self.total = norm[0].item()"}
    text = HEAD + filled(OPTIMIZER, given)
    assert [f.weight for f in check(ScriptProgram.of_text(text), ["FL101"])] == [0, -1]


def test_the_step_of_an_own_optimizer_is_the_step_of_a_training_loop():
    text = (
        HEAD
        + filled(OPTIMIZER)
        + """
model = nn.Linear(4, 1)
optimizer = Own(model.parameters(), {})
for x in DataLoader(torch.randn(64, 4), batch_size=8):
    model(x).mean().backward()
    optimizer.step()
"""
    )
    assert [f.rule for f in check(ScriptProgram.of_text(text), ["FL001"])] == ["FL001"]
