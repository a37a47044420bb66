"""Records: JSON both ways, tolerant of the fields of a newer flatout."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.schema.enums import Effect, Moment
from flatout.schema.errors import error_line
from flatout.schema.facts import Facts, Gpu
from flatout.schema.records import PhaseTime, Ratio, TrialRecord
from flatout.schema.run_request import RunSummary
from flatout.schema.session import (
    ComparisonRecord,
    GuardCheck,
    GuardRecord,
    LeverRecord,
    ProgramFigures,
    SessionRecord,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
maybe = st.none() | finite
ratios = st.builds(Ratio, finite, finite, finite, st.integers(0, 99))
values = st.one_of(st.booleans(), st.integers(), st.dictionaries(st.text(), st.integers(), max_size=2))
levers = st.builds(
    LeverRecord, st.text(), values, st.text(), maybe, maybe, maybe, st.integers(0, 9), st.text()
)
checks = st.builds(GuardCheck, st.text(), st.booleans(), st.text(), maybe)
guards = st.builds(GuardRecord, st.text(), st.text(), st.lists(checks, max_size=2))
comparisons = st.builds(ComparisonRecord, st.text(), st.text(), st.text(), maybe, maybe, maybe, st.integers())
sessions = st.builds(
    SessionRecord,
    st.lists(st.text()),
    st.text(),
    st.dictionaries(st.text(), st.text(), max_size=2),
    speedup=st.none() | ratios,
    noise_floor=st.none() | ratios,
    guard=guards,
    levers=st.lists(levers, max_size=2),
    comparisons=st.lists(comparisons, max_size=2),
    baseline=st.builds(ProgramFigures, step_ms=maybe),
    payback_steps=st.none() | st.integers(0),
)


@given(sessions)
def test_session_through_a_file(session):
    assert SessionRecord.from_json(json.loads(json.dumps(session.to_json()))) == session


@given(sessions)
def test_unknown_keys_are_ignored_everywhere(session):
    data = json.loads(json.dumps(session.to_json()))
    for place in (data, data["guard"], data["baseline"], *data["levers"], *data["comparisons"]):
        place["of a newer flatout"] = {"x": [1]}
    assert SessionRecord.from_json(data) == session


CUDA = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
WORKER = f"RuntimeError: Caught ValueError in DataLoader worker process 0.\nOriginal {TRACE}ValueError: bad\n"


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (CUDA, "CUDA error: device-side assert triggered"),
        (f"{TRACE}torch.AcceleratorError: {CUDA}", "torch.AcceleratorError: CUDA error: device-side assert"),
        (f"{TRACE}KeyError: 'x'\n", "KeyError: 'x'"),
        (f"{TRACE}RuntimeError:\n\n  Start it in main\n", "RuntimeError: Start it in main"),
        (f"{TRACE}{WORKER}", "ValueError: bad"),
        ("loading\nstopped\n", "stopped"),
        ("", "it ended without a message"),
    ],
)
def test_what_a_program_ended_with(reason, line):
    assert error_line(reason).startswith(line)
    assert TrialRecord("failed", reason).error_line == (error_line(reason) if reason else "failed")


def test_the_limit_of_a_run_is_not_called_computing_where_the_gpu_is_idle():
    def run(**more):
        return RunSummary([], "", device="cuda", steps_per_s=1000 / 6.56, **more)

    assert run(gpu_busy=0.04).limited_by == "launches and Python: the device is idle 6.3 of 6.6 ms a step"
    assert run(gpu_busy=0.9).limited_by == "computing on the GPU"
    assert run().limited_by.startswith("unknown")
    tuned = {"choices": [1]}
    assert run(plan=tuned, gpu_busy=0.9).next_command == ""
    assert run(plan=tuned, gpu_busy=0.0).next_command == run(plan=tuned).next_command == "profile"


def test_trial_through_a_file():
    record = TrialRecord(
        "finished",
        steps=3,
        step_ms=1.5,
        losses=[(0.1).hex()],
        weights_digests={"1": "ab"},
        phases={"forward": PhaseTime(1, 1, 2, 0.5).to_json()},
    )
    assert TrialRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_facts_through_a_file():
    facts = Facts(
        cpu="x",
        cores=4,
        cpu_flags=("avx2",),
        gpus=(Gpu("H200", 2**37, (9, 0)),),
        versions={"torch": "2.14.1"},
        environment={"A": "b"},
    )
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    assert facts.cuda
    assert not Facts().cuda


def test_effects_are_ordered_from_exact_to_changed_maths():
    assert [e.value for e in sorted(Effect, key=lambda e: e.rank)] == [
        "exact",
        "rounding",
        "precision",
        "resampled",
        "changes_math",
    ]
    assert [m.value for m in Moment] == ["process", "import", "loader", "model", "optimizer", "step"]


def test_a_ratio_says_how_sure_it_is():
    assert Ratio(1.344, 1.2, 1.5, 6).sentence() == "1.34x (1.20-1.50, n=6)"


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_a_ratio_against_something_faster_is_smaller(median, factor):
    ratio = Ratio(median, 0.9 * median, 1.1 * median, 5)
    other = ratio.relative_to(factor)
    assert math.isclose(other.median * factor, median)
    assert other.low <= other.median <= other.high
    assert other.n == 5
