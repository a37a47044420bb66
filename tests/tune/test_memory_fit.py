"""The fastest plan that fits into memory: measured in a real program, chosen by rule, explained in the
report.
"""

import json

import pytest

from flatout.cli.options.arguments import Amount
from flatout.levers import TABLE
from flatout.schema.enums import Effect, Origin, Status
from flatout.schema.plan import Choice
from flatout.schema.records import Ratio
from flatout.schema.session import SessionRecord, TimeMemoryPoint
from flatout.tune.candidates import Candidate, make_candidates
from flatout.tune.goal import Goal
from flatout.tune.search import FrontierPoint, _choose_point, fit_memory, observe
from flatout.tune.session import verdict

LEVER = {lever.name: lever for lever in TABLE}
SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
block = lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
model = nn.Sequential(*(block() for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(200)
def test_the_frontier_of_a_real_program(new_tuning, monkeypatch):
    """Every value of recompute is a point with a ratio and a peak.

    The peak falls block by block, and the fastest point that fits is taken.
    """
    pytest.importorskip("torch")
    tuning = new_tuning(SCRIPT, Goal(1000.0, memory_limit_bytes=10**9))
    session = tuning.session
    observe(tuning)
    assert tuning.candidates["recompute"].saves_memory
    assert not tuning.candidates[
        "recompute"
    ].selectable  # levers that trade speed for memory do not compete on speed
    monkeypatch.setattr("flatout.tune.search.MAX_LIVE_S", 0.1)
    tuning.candidates["recompute"].values = ({"blocks": 0.5}, {"blocks": 1.0})
    fit_memory(tuning, [])  # everything fits
    assert not tuning.must_fit
    peaks = {point.plan: point.peak_bytes for point in session.frontier}
    assert list(peaks) == ["plain", "recompute(blocks=0.5)", "recompute(blocks=1.0)"]
    plain = peaks["plain"]
    fixed = 6 * (64 * 256 * 2 + 256 + 64 * 3) * 4 * 2  # parameters and gradients
    kept = {name: (peak - fixed) / (plain - fixed) for name, peak in peaks.items()}
    assert kept["recompute(blocks=0.5)"] < 0.75
    assert kept["recompute(blocks=1.0)"] < 0.45
    assert all(point.ratio is not None for point in session.frontier[1:])
    tuning.goal = Goal(1000.0, memory_limit_bytes=int(plain * 0.9))
    taken = fit_memory(tuning, [])
    assert [candidate.lever.name for candidate in taken] == ["recompute"]
    assert tuning.must_fit
    assert [point.fits for point in session.frontier] == [False, True, True]
    fastest = max(session.frontier[1:], key=lambda point: point.ratio.median)
    assert [point.chosen for point in session.frontier] == [point is fastest for point in session.frontier]
    assert SessionRecord.from_json(json.loads(json.dumps(session.to_json()))).frontier == session.frontier


def candidate(name):
    return Candidate(LEVER[name], (), LEVER[name].effect, value=True)


def measured(peak, ratio=None, parts=(), with_live_levers=False, limit=100):
    return FrontierPoint(
        TimeMemoryPoint("x", peak, Ratio(ratio, ratio, ratio, 3) if ratio else None, fits=peak <= limit),
        parts,
        with_live_levers,
    )


@pytest.fixture
def tuning(new_tuning):
    made = new_tuning(goal=Goal(10.0, memory_limit_bytes=100))
    made.session.memory_limit_bytes = 100
    return made


def test_the_choice(tuning):
    recomputed, fused = candidate("recompute"), candidate("fused_optimizer")
    part = ((recomputed, Choice("recompute", {"blocks": 1.0}, Origin.TUNER)),)
    # The plain program and the winners fit: the winners stay.
    assert _choose_point(
        tuning,
        [fused],
        [
            measured(90),
            measured(95, 1.2, with_live_levers=True),
            measured(50, 0.9, part, with_live_levers=True),
        ],
    ) == [fused]
    # The plain program fits; the winners do not.
    assert _choose_point(tuning, [fused], [measured(90), measured(120, 1.2, with_live_levers=True)]) == []
    assert fused.status is Status.REJECTED
    # Only the slower levers fit.
    fused.status = Status.SKIPPED
    assert _choose_point(
        tuning,
        [fused],
        [
            measured(150),
            measured(160, 1.2, with_live_levers=True),
            measured(90, 0.8, part, with_live_levers=True),
        ],
    ) == [fused, recomputed]
    assert tuning.must_fit
    assert (recomputed.value, recomputed.status) == ({"blocks": 1.0}, Status.SKIPPED)
    # Nothing fits.
    assert (
        _choose_point(tuning, [fused], [measured(150), measured(101, 0.8, part, with_live_levers=True)]) == []
    )


def test_messages():
    session = SessionRecord(["x"], "", {}, memory_limit_bytes=100 * 2**20)
    session.frontier = [
        TimeMemoryPoint("plain", 150 * 2**20),
        TimeMemoryPoint("recompute(blocks=1.0)", 120 * 2**20, Ratio(0.8, 0.7, 0.9, 3)),
    ]
    assert "the smallest, recompute(blocks=1.0), needs 20.0 MiB more" in verdict(session)
    session.frontier[1].peak_bytes, session.frontier[1].fits = 90 * 2**20, True
    assert "was not confirmed" in verdict(session)
    session.frontier[1].chosen, session.speedup, session.guard.verdict = True, Ratio(0.8, 0.7, 0.9, 3), "same"
    assert verdict(session) == (
        "recompute(blocks=1.0) fits into 100 MiB, the plain program does not: 0.80x (0.70-0.90, n=3) as fast, "
        "with bitwise identical results"
    )
    session.frontier[0].fits = True
    assert verdict(session).startswith("probably 0.80x")


def test_without_a_limit_memory_levers_are_not_measured():
    answers = {lever.name: {"values": [True], "effect": None} for lever in TABLE}
    every = frozenset(Effect) - {Effect.CHANGES_MATH}
    saving = {lever.name for lever in TABLE if lever.saves_memory}
    found = make_candidates(answers, every, None)
    assert {name for name in saving if found[name].values} == set()
    assert "--memory-limit" in found["recompute"].reason
    limited = make_candidates(answers, every, None, memory_limited=True)
    assert {name for name in saving if limited[name].saves_memory} == saving
    assert not any(limited[name].selectable for name in saving)
    assert make_candidates(answers, every, frozenset({"recompute"}))[
        "recompute"
    ].selectable  # requested by name, it competes on speed like any other


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("800mib", 800 * 2**20),
        ("512", 512),
        ("2q", None),
        ("-1GB", None),
        ("GB", None),
        ("8GBs", None),
        ("0", None),
        ("nanGB", None),
    ],
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(Exception, match="amount of memory"):
            Amount().convert(text, None, None)
    else:
        assert Amount().convert(text, None, None) == size
