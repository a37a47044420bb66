"""A program's optimizers work as before, without the compiler that they would import."""

import pytest

pytestmark = pytest.mark.processes

EAGER = """
import sys
import torch

def losses(kind, compiled=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.01)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1})
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean() + sum(p.sum() for p in optimizer.param_groups[1]["params"])
        loss.backward()
        step()
        assert torch.is_grad_enabled()
        print(kind.__name__, loss.item().hex())
    optimizer.load_state_dict(optimizer.state_dict())

for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
    losses(kind)
print("imported", "torch._dynamo" in sys.modules, file=sys.stderr)
"""
COMPILED = """
code = torch.optim.AdamW.step.__wrapped__.__code__.co_name
losses(torch.optim.AdamW, compiled=True)
print("imported", "torch._dynamo" in sys.modules, code, torch.optim.AdamW.step.__wrapped__.__code__.co_name, file=sys.stderr)
print(sorted(torch._dynamo.utils.counters["stats"].items()), len(torch._dynamo.utils.counters["graph_break"]))
"""


def test_optimizers_train_as_before_without_the_compiler(flatout, script):
    script(EAGER)
    plain, run = flatout.plain("python", "train.py"), flatout("run", "python", "train.py", really=True)
    assert "imported True" in plain.err
    assert "imported False" in run.err
    assert (run.code, run.out) == (plain.code, plain.out)


def test_a_program_that_compiles_finds_torch_as_it_is(flatout, script):
    script(EAGER + COMPILED)
    plain, run = flatout.plain("python", "train.py"), flatout("run", "python", "train.py", really=True)
    assert "imported True _use_grad _use_grad" in plain.err
    assert "imported True step _use_grad" in run.err
    assert (run.code, run.out) == (plain.code, plain.out)
