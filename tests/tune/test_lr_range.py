"""The learning-rate range test: the curve is read correctly, and `flatout lr` runs it on real programs
without changing them.
"""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.lr_range import find_rates, smoothed, suggest
from flatout.render.lr_page import lr_page, lr_plot
from flatout.render.page import html
from flatout.schema.batch import LrPoint, LrRecord


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
    steepest, lowest, diverged = find_rates(points(valley))
    assert 3e-4 < steepest < 6e-3
    assert 1e-2 < lowest < 0.3
    assert 0.3 < diverged < 3
    rate, why = suggest(steepest, lowest, diverged)
    assert rate == steepest
    assert "falls fastest" in why


@pytest.mark.parametrize("seed", range(8))
def test_noise_before_the_fall_is_no_fall(seed):
    """The steepest point of the smoothed losses alone lies at about 1e-6 for two of these seeds."""
    draw = random.Random(seed)
    rates = find_rates(points(lambda rate: valley(rate / 10) + draw.gauss(0, 0.8), count=150))
    assert 1e-3 < rates[0] < 0.5


def test_noise_alone_gives_no_rate():
    draws = map(random.Random, range(60))
    found = [find_rates(points(lambda rate: 3 + draw.gauss(0, 0.4), count=60))[0] for draw in draws]  # noqa: B023
    assert found.count(None) >= 54


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
    found = find_rates(points(lambda rate: value if math.isfinite(value := loss_of(rate)) else None))
    rate, why = suggest(*found)
    assert rate is None
    assert words in why


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=60))
def test_any_recorded_losses_are_read_and_plotted(losses):
    record = LrRecord(["python", "train.py"], "/")
    record.points = [
        LrPoint(1e-6 * 1.2**at, loss, smooth)
        for at, (loss, smooth) in enumerate(zip(losses, smoothed(losses), strict=True))
    ]
    record.steepest, record.lowest, record.diverged = find_rates(record.points)
    record.suggestion, record.why = suggest(record.steepest, record.lowest, record.diverged)
    assert (record.suggestion is None) or record.suggestion > 0
    assert LrRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    finite = next((at for at, loss in enumerate(losses) if loss is None), len(losses))
    assert (lr_plot(record) is None) == (finite < 3)
    assert "</html>" in html(lr_page(record))


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
    assert record.groups == pytest.approx([0.15, 0.015])
    assert any("proportion" in note for note in record.notes)
    assert record.suggestion is None
    assert "does not fall" in record.why


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_program_that_fails_at_a_large_rate_diverged_there(flatout, script):
    """SGD on a small regression falls between 1e-3 and 1 and fails at 10."""
    script(LEARNS)
    done = flatout("lr", "--job", "job", "--steps", "80", "python", "train.py", timeout=100)
    assert done.code == 0, done.err
    record = LrRecord.from_json(json.loads((flatout.folder / "job" / "lr.json").read_text()))
    assert (record.status, record.optimizer, record.groups) == ("done", "SGD", [1e-6])
    assert 1e-3 < record.suggestion < 1
    assert 40 < len(record.points) < 80
    assert record.points[-1].loss is None
    assert record.diverged is not None
    assert f"the program failed at the learning rate {record.points[-1].lr:.2g}" in record.notes[0]
    assert "ValueError: this is no loss any more" in record.notes[0]
    assert f"suggested {record.suggestion:.2g}" in (flatout.folder / "job" / "lr.html").read_text()
    assert done.left == []
    assert sorted(path.name for path in flatout.folder.iterdir()) == ["job", "train.py"]


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
