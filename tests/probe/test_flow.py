"""The kinds of a script's events, and its training loop."""

import pytest

from flatout.probe.program import ScriptProgram

BEGIN = (
    "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
)


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


def test_a_loop_over_optimizers_is_not_the_training_loop():
    code = f"{BEGIN}for i in range(3):\n    model(torch.zeros(1, 4)).sum().backward()\n    for o in [optimizer]:\n        optimizer.step()\n"
    (loop,) = ScriptProgram.of_text(code).step_loops
    assert loop.loop.node.lineno == 4
