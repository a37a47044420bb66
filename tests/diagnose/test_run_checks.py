"""`flatout run` watches its first steps: it says once what will ruin the run, keeps it in the record, and leaves."""

import json
from importlib import import_module

import pytest

from flatout.diagnose.rules import TABLE
from flatout.diagnose.run_checks import INVARIANTS, LOOKS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

PROGRAM = """
import torch
from torch.optim import optimizer as optimizers

torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.position = torch.nn.Parameter(torch.zeros(8))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.head(x)

before = torch.nn.Module.load_state_dict, torch.autograd.backward
net = Net()
net.load_state_dict({"module.head.bias": torch.zeros(1)}, strict=False)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(250):
    optimizer.zero_grad()
    net(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
print(sorted({h.__module__ for hook in hooks for h in hook.values()}), net.head.weight.sum().item().hex())
"""


def record(flatout):
    (path,) = flatout.folder.glob(".flatout/*/runs/*/rank0.json")
    return json.loads(path.read_text())


def test_a_run_says_once_what_will_ruin_it(flatout, script):
    pytest.importorskip("torch")
    script(PROGRAM)
    watched = flatout("run", "python", "train.py", timeout=110)
    assert watched.code == 0
    lines = [line for line in watched.err.splitlines() if line.startswith("flatout: FL")]
    assert [line.split(":")[1].strip() for line in lines] == ["FL060", "FL070"]
    assert "1 of 3 parameters got no gradient in 60 steps: Net.position" in lines[0]
    assert "(train.py:9)" in lines[0]
    assert "flatout.diagnose.run_checks" not in watched.out
    assert [finding["rule"] for finding in record(flatout)["findings"]] == ["FL060", "FL070"]


def test_checks_are_turned_off_and_silenced(flatout, script, monkeypatch):
    pytest.importorskip("torch")
    script(PROGRAM)
    script('[tool.flatout.ignore]\nFL060 = "positions come later"\n', "pyproject.toml")
    some = flatout("run", "python", "train.py", timeout=110)
    none = flatout("run", "--no-checks", "python", "train.py", timeout=110)
    assert ("FL060" in some.err, "FL070" in some.err) == (False, True)
    assert "FL0" not in none.err
    assert some.out == none.out
    script("[tool.flatout.ignore]\nFL060 = 1\n", "pyproject.toml")
    assert "write [tool.flatout.ignore] as codes with reasons" in flatout("run", "python", "train.py").err


def test_all_that_watch_a_run_are_named():
    in_run = {rule.name for rule in TABLE if rule.invariant is not None and rule.invariant.in_run}
    assert in_run == {import_module(f"flatout.diagnose.invariants.{name}").RULE.name for name in INVARIANTS}
    assert LOOKS[-1] == 200
