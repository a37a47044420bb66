"""The order of events: branches of an if, loops, blocks, entered functions, and which events can happen
together.
"""

import ast

import pytest

from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import implies, loops_over, together

BEGIN = (
    "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
)


def events(code):
    """The calls of one-letter functions, by name."""
    found = ScriptProgram.of_text(code).events
    return {
        event.node.func.id: event
        for event in found
        if isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Name)
    }


def test_events_in_different_branches_do_not_happen_together():
    at = events("if x:\n    a()\n    if y:\n        b()\nelse:\n    c()\nd()\n")
    assert not together(at["a"], at["c"])
    assert together(at["a"], at["b"])
    assert together(at["c"], at["d"])
    assert implies(at["b"], at["a"])
    assert not implies(at["a"], at["b"])
    assert implies(at["c"], at["d"])


def test_a_main_guard_is_no_condition():
    at = events("a()\nif __name__ == '__main__':\n    b()\n")
    assert implies(at["a"], at["b"])


def test_arguments_come_before_their_call_and_functions_are_entered_where_they_are_called():
    code = "def f():\n    inside()\ndef unused():\n    later()\nfirst(second(), [third() for _ in range(3)])\nf()\nlast()\n"
    names = [
        event.node.func.id for event in ScriptProgram.of_text(code).events if isinstance(event.node, ast.Call)
    ]
    assert names == ["second", "range", "third", "first", "inside", "f", "last", "later"]
    assert [type(loop.node).__name__ for loop in events(code)["third"].loops] == ["ListComp"]


def test_an_event_knows_the_blocks_and_decorators_around_it_through_calls():
    code = "import torch\n@torch.no_grad()\ndef f():\n    a()\nwith torch.autocast('cpu'):\n    f()\n"
    at = events(code)["a"]
    assert [call.func.attr for _, call in at.within("torch.no_grad", "torch.autocast")] == [
        "autocast",
        "no_grad",
    ]


def test_an_instance_is_made_and_its_methods_are_entered():
    code = "class T:\n    def __init__(self):\n        a()\n    def run(self):\n        b()\nclass U(T):\n    pass\nt = U()\nt.run()\n"
    names = [
        event.node.func.id
        for event in ScriptProgram.of_text(code).events
        if isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Name)
    ]
    assert names == ["a", "U", "b"]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("loss.backward()", "backward"),
        ("torch.autograd.backward(loss)", "backward"),
        ("accelerator.backward(loss)", "backward"),
        ("optimizer.step()", "step"),
        ("torch.optim.lr_scheduler.StepLR(optimizer, 1).step()", "scheduler"),
        ("torch.amp.GradScaler().step(optimizer)", "scaler_step"),
        ("torch.amp.GradScaler().update()", "scaler_update"),
        ("torch.amp.GradScaler().unscale_(optimizer)", "unscale"),
        ("torch.profiler.profile().step()", "profiler_step"),
        ("optimizer.zero_grad()", "zero_grad"),
        ("model.weight.grad = None", "zero_grad"),
        ("model.weight.grad.zero_()", "zero_grad"),
        ("model.weight.data.zero_()", "call"),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "clip"),
        ("model.eval()", "eval"),
        ("model.train(False)", "eval"),
        ("model.train()", "train"),
        ("game.step(action)", "call"),
    ],
)
def test_the_events_of_a_line(line, kind):
    assert (
        ScriptProgram.of_text(f"{BEGIN}loss = model(torch.zeros(1, 4)).sum()\n{line}\n").events[-1].kind
        == kind
    )


def test_a_closure_runs_before_its_step():
    code = f"{BEGIN}def closure():\n    model(torch.zeros(1, 4)).sum().backward()\nfor i in range(3):\n    optimizer.step(closure)\n"
    (loop,) = ScriptProgram.of_text(code).step_loops
    assert [event.kind for event in loop.events if event.kind != "call"] == ["backward", "step"]


def test_a_loop_over_optimizers_is_not_the_training_loop():
    code = f"{BEGIN}for i in range(3):\n    model(torch.zeros(1, 4)).sum().backward()\n    for o in [optimizer]:\n        optimizer.step()\n"
    (loop,) = ScriptProgram.of_text(code).step_loops
    assert loop.loop.node.lineno == 4


@pytest.mark.parametrize(
    "over", ["loader", "enumerate(loader)", "tqdm(enumerate(loader, 1))", "tqdm.tqdm(loader, leave=False)"]
)
def test_the_iterable_of_a_loop(over):
    node = ast.parse(f"for x in {over}: pass").body[0]
    assert ast.unparse(loops_over(node)) == "loader"
