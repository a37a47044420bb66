"""What a notebook shows of a Loop."""

import re

import pytest

torch = pytest.importorskip("torch")

import flatout  # noqa: E402
from flatout.render.loop_view import loop_html  # noqa: E402
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
