"""A Loop in a notebook: its cells, and what it shows."""

import re

import pytest

torch = pytest.importorskip("torch")

import flatout  # noqa: E402
from flatout.render.page import loop_html  # noqa: E402
from flatout.schema.plan import Choice, Plan  # noqa: E402


def words(html):
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_a_loop_shows_its_progress_and_why_a_lever_is_not_active():
    model = torch.nn.Linear(4, 1)
    batches = [torch.randn(8, 4) for _ in range(5)]
    plan = Plan((Choice("tf32", True), Choice("gc_pause", True)))
    loop = flatout.Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        batches,
        epochs=3,
        plan=plan,
    )
    assert "0 of 15 steps done epochs done 0 of 3" in words(loop._repr_html_())
    for step in loop:
        if step.index == 6:
            shown = words(loop._repr_html_())
            assert shown.startswith("Linear, SGD 7 of 15 steps done throughput")
            assert "epochs done 1 of 3" in shown
            assert "gc_pause active" in shown
            assert re.search(r"tf32 not active \w+", shown)
    loop.close()
    assert "15 of 15 steps done" in words(loop._repr_html_())
    loop = flatout.Loop(model, loop.optimizer, loop.loss_fn, batches, steps=4, effective_batch=16)
    assert "0 of 4 steps done" in words(loop._repr_html_())


def test_text_of_a_script_is_no_markup():
    html = loop_html("<b>Net</b>", 3, None, [("plan", "<script>")], [("a", "kept", "1 < 2")])
    assert "<b>" not in html
    assert "<script>" not in html
    assert "1 &lt; 2" in html
    assert "<progress" not in html


CELLS = [
    """
import torch
from torch import nn
import flatout
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = flatout.Loop(model, optimizer, loss_fn, batches, epochs=2)
""",
    """
for step in loop:
    if step.index == 5:
        raise KeyboardInterrupt  # the stop button
""",
    "shown = repr(loop)",
    """
for step in loop:
    pass
""",
    """
loop = flatout.Loop(model, optimizer, interrupted, batches, epochs=1)
for step in loop:
    pass
""",
    """
rest = [step.index for step in loop]
loop.close()
loop.close()
""",
]


def test_the_cells_of_a_notebook():
    """Interrupted between two steps and inside one, inspected, resumed, created again, closed twice."""

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    once = iter([False] * 3 + [True])

    def interrupted(model, batch):
        if next(once, False):
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    space = {
        "loss_fn": loss_fn,
        "interrupted": interrupted,
        "batches": [(torch.randn(8, 6), torch.arange(8) % 3) for _ in range(10)],
    }
    stopped = []
    for at, cell in enumerate(CELLS):
        try:
            exec(compile(cell, f"cell {at}", "exec"), space)
        except KeyboardInterrupt:
            stopped.append(at)
    assert stopped == [1, 4]
    assert space["shown"] == "Loop(Linear, SGD, 6 steps done, epoch 0, plain)"
    assert space["rest"] == list(range(3, 13))
    assert all(p.isfinite().all() for p in space["model"].parameters())
