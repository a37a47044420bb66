"""The learning-rate range test: the curve is read correctly, and `flatout lr` runs it on real programs
without changing them.
"""

from __future__ import annotations

import json
import keyword
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.lr_range import read, smoothed, suggest
from flatout.render.lr_page import at_the_end, lr_html, lr_plot, training_plot
from flatout.schema.errors import UsageError
from flatout.schema.lr_range import LrPoint, LrRange, LrRecord, LrTraining, read_optimizers
from flatout.trial.probes.lr_range import OptimizerStandIn


def points(loss_of, low=1e-6, high=10.0, count=120):
    rates = [low * (high / low) ** (at / (count - 1)) for at in range(count)]
    losses = [loss_of(rate) for rate in rates]
    return [
        LrPoint(lr, loss, smooth) for lr, loss, smooth in zip(rates, losses, smoothed(losses), strict=True)
    ]


def valley(rate):
    """Flat, then falling around 1e-3, lowest about 3e-2, diverged above 0.5."""
    fall = 2.0 / (1 + (1e-3 / rate) ** 1.5)
    return 3.0 - fall + (rate / 0.3) ** 3


def test_a_valley_is_read():
    steepest, lowest, diverged = read(points(valley))
    assert 3e-4 < steepest < 6e-3
    assert 1e-2 < lowest < 0.3
    assert 0.3 < diverged < 3
    rate, why = suggest(steepest, lowest, diverged)
    assert rate == steepest
    assert "falls fastest" in why


def test_the_suggestion_keeps_a_distance_from_the_edge():
    rate, why = suggest(0.09, 0.1, 0.12)
    assert rate == pytest.approx(0.1 / 3)
    assert "too close" in why


@pytest.mark.parametrize(
    ("loss_of", "words"),
    [
        (lambda rate: 3.0, "does not fall anywhere"),
        (lambda rate: 3.0 + 1e5 * rate, "before it diverges"),
        (lambda rate: 1.0 if rate < 1e-3 else math.inf, "before it diverges"),
    ],
    ids=["flat", "rising", "infinite"],
)
def test_no_suggestion_is_explained(loss_of, words):
    found = read(points(lambda rate: value if math.isfinite(value := loss_of(rate)) else None))
    rate, why = suggest(*found)
    assert rate is None
    assert words in why


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=60))
def test_any_recorded_losses_are_read_and_plotted(losses):
    test = LrRange()
    test.points = [
        LrPoint(1e-6 * 1.2**at, loss, smooth)
        for at, (loss, smooth) in enumerate(zip(losses, smoothed(losses), strict=True))
    ]
    test.steepest, test.lowest, test.diverged = read(test.points)
    test.suggestion, test.why = suggest(test.steepest, test.lowest, test.diverged)
    assert (test.suggestion is None) or test.suggestion > 0
    record = LrRecord(
        ["python", "train.py"], "/", tests=[test, LrRange("</script>", why="<b>")], compute_s=1.0
    )
    record.trainings = [
        LrTraining("as it is", 0.1, True, 2.0, test.points),
        LrTraining("adamw", why="no such thing"),
    ]
    assert LrRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    page = lr_html(record)
    assert "</html>" in page
    assert "<b>" not in page
    recorded = next((at for at, loss in enumerate(losses) if loss is None), len(losses))
    assert (lr_plot(test) is None) == (recorded < 3)
    assert (training_plot(record.trainings) is None) == (recorded < 2)


NAME = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
VALUE = st.one_of(st.booleans(), st.floats(0, 1), st.tuples(st.floats(0, 1), st.floats(0, 1)))
OPTIONS = st.dictionaries(st.sampled_from(["momentum", "betas", "nesterov"]), VALUE)


@given(
    st.lists(
        st.tuples(st.one_of(NAME, st.tuples(NAME, NAME).map(".".join)), OPTIONS),
        min_size=1,
        max_size=4,
        unique_by=lambda pair: pair[0].lower(),
    )
)
def test_optimizers_are_read_as_they_are_written(wanted):
    text = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name
        for name, options in wanted
    )
    assert [(request.name, request.options) for request in read_optimizers(text)] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sgd(",
        "sgd(0.9)",
        "sgd(**x)",
        "sgd(momentum=__import__('os'))",
        "1 + 1",
        "own,own",
        "a b",
        "sgd,,adam",
    ],
)
def test_invalid_optimizers_are_rejected(text):
    with pytest.raises(UsageError, match="optimizers"):
        read_optimizers(text)


QUADRATIC = """
import os, torch
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.ones(20))
scale = torch.linspace(0.2, 1.0, 20)
model = torch.nn.Module(); model.weight = weight
optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.3}, {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.03}], lr=0.1)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 10**9)
for step in range(10**7):
    loss = ((weight + 0.01 * torch.randn(20) - 5) ** 2 * scale).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
    with torch.no_grad():
        weight.mul_(0).add_(1 + 0.0 * step)
"""

LEARNS = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
teacher = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(10**7):
    x = torch.randn(64, 16)
    loss = (model(x) - 3 * teacher(x).detach() - 1).square().mean()
    if loss > 1000:
        raise ValueError("this is no loss any more")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_groups_keep_their_proportion_and_a_scheduler_has_no_say(flatout, script):
    """The weight starts each step at 1, so its loss is the same at every learning rate.

    Nothing falls, and the report says so.
    """
    script(QUADRATIC)
    done = flatout(
        "lr", "--json", "--job", "job", "--steps", "40", "--high", "1", "python", "train.py", timeout=100
    )
    assert done.code == 0, done.err
    record = LrRecord.from_json(json.loads(done.out))
    assert record.tests[0].groups == pytest.approx([0.15, 0.015])
    assert any("proportion" in note for note in record.notes)
    assert record.tests[0].suggestion is None
    assert "does not fall" in record.tests[0].why


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_optimizers_side_by_side(flatout, script):
    """SGD on a small regression falls between 1e-3 and 1 and fails at 10.

    Each optimizer then trains from the same weights at its suggested rate.
    """
    script(LEARNS)
    done = flatout(
        "lr",
        "--job",
        "job",
        "--steps",
        "80",
        "--optimizers",
        "own,adamw(betas=(0.8, 0.9))",
        "python",
        "train.py",
        timeout=200,
    )
    assert done.code == 0, done.err
    record = LrRecord.from_json(json.loads((flatout.folder / "job" / "lr.json").read_text()))
    assert record.status == "done"
    own, adamw = record.tests
    assert (own.optimizer, adamw.optimizer) == ("SGD", "AdamW")
    assert own.groups == adamw.groups == [1e-6]
    assert 1e-3 < own.suggestion < 1
    assert 40 < len(own.points) < 80
    assert own.points[-1].loss is None
    assert own.diverged is not None
    assert f"own: the program failed at the learning rate {own.points[-1].lr:.2g}" in record.notes[0]
    assert "ValueError: this is no loss any more" in record.notes[0]
    as_is, *others = record.trainings
    assert [each.name for each in others] == ["own", "adamw(betas=(0.8, 0.9))"]
    assert {point.lr for point in as_is.points} == {1e-6}
    assert [each.lr for each in others] == [own.suggestion, adamw.suggestion]
    for each in others:
        assert each.points[0].loss == as_is.points[0].loss  # before any update
        assert at_the_end(each) < 0.9 * at_the_end(as_is)
    assert "After the same compute time" in done.out
    page = (flatout.folder / "job" / "lr.html").read_text()
    assert "<script" not in page
    assert f"suggested {own.suggestion:.2g}" in page
    assert done.left == []
    assert sorted(path.name for path in flatout.folder.iterdir()) == ["job", "train.py"]


def test_a_stand_in_steps_like_the_optimizer():
    torch = pytest.importorskip("torch")

    def trained(in_place):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        kind = torch.optim.SGD if in_place else torch.optim.Adam
        optimizer = kind(
            [
                {"params": [model.weight], "lr": 0.1, "weight_decay": 0.01},
                {"params": [model.bias], "lr": 0.01},
            ],
            lr=1.0,
        )
        stand_in = OptimizerStandIn(torch, optimizer, "adam", {}) if in_place else None
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            if stand_in is not None:
                stand_in.before()
                optimizer.step()
                stand_in.step()
            else:
                optimizer.step()
        return [*model.parameters()]

    for mine, theirs in zip(trained(True), trained(False), strict=True):
        assert torch.equal(mine, theirs)
    own = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(LookupError, match="no optimizer muun; it has adadelta"):
        OptimizerStandIn(torch, own, "muun", {})
    with pytest.raises(LookupError, match="no optimizer optimizer"):
        OptimizerStandIn(torch, own, "optimizer", {})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "options", "code", "words"),
    [
        ("raise ValueError('no data here')", (), 1, "no data here"),
        ("import torch", (), 3, "could not be raised"),
        ("", ("--low", "1", "--high", "0.1"), 2, "not below"),
        ("", ("--steps", "3"), 2, "20"),
    ],
    ids=["fails", "never trains", "turned round", "too few"],
)
def test_clear_messages(flatout, script, source, options, code, words):
    script(source)
    done = flatout("lr", "--job", "job", *options, "python", "train.py")
    assert done.code == code
    assert words in done.err
