"""Phases of a step, under a clock that the test advances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.clock import HostClock, cpu_seconds, seconds
from flatout.measure.phases import MAX_STEPS, PhaseRecorder
from flatout.schema.records import PHASES


class HandClock:
    """Milliseconds that pass only on request; stands for a device whose work is done later."""

    name = "hand"

    def __init__(self):
        self.now = 0.0
        self.settled = 0

    def mark(self):
        return self.now

    def elapsed_ms(self, start, end):
        return end - start

    def synchronize(self):
        self.settled += 1


@pytest.fixture
def hand():
    """A recorder whose host clock and device clock are one, and a function that runs a step."""
    return made()


def made():
    clock = HandClock()
    recorder = PhaseRecorder(clock)
    recorder._host = clock

    def span(phase, ms, *inside):
        if phase != "other":
            recorder.begin(phase)
        clock.now += ms
        for one in inside:
            span(*one)
        if phase != "other":
            recorder.end(phase)

    def step(*nested, **spans):
        start = clock.mark()
        for one in (*nested, *spans.items()):
            span(*one)
        recorder.step(start, clock.mark())

    return clock, recorder, step


def medians(recorder):
    return {name: phase.median_ms for name, phase in recorder.summary().items() if phase.median_ms}


def test_each_phase_gets_its_time(hand):
    _, recorder, step = hand
    step(data=1, forward=2, backward=4, optimizer=1, other=2)
    found = {"data": 1, "copy": 0, "forward": 2, "backward": 4, "optimizer": 1, "other": 2}
    summary = recorder.summary()
    assert {name: phase.median_ms for name, phase in summary.items()} == found
    assert {name: phase.share for name, phase in summary.items()} == {
        name: ms / 10 for name, ms in found.items()
    }


@given(
    st.lists(
        st.fixed_dictionaries({p: st.floats(0.01, 100) for p in ("data", "forward", "backward", "other")}),
        min_size=1,
        max_size=20,
    )
)
def test_shares_add_up_and_quartiles_are_ordered(steps):
    _, recorder, step = made()
    for spans in steps:
        step(**spans)
    summary = recorder.summary()
    assert set(summary) == set(PHASES) - {"exchange"}  # one process has none
    assert sum(phase.share for phase in summary.values()) == pytest.approx(1.0)
    assert all(0 <= phase.low_ms <= phase.median_ms <= phase.high_ms for phase in summary.values())


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        # accumulation: two forwards and two backwards in one step
        ([("forward", 3), ("backward", 5)] * 2, {"forward": 6, "backward": 10}),
        # an exchange between ranks is no part of the backward pass
        ([("backward", 3, ("exchange", 4))], {"backward": 3, "exchange": 4}),
        # LBFGS calls forward and backward inside its step
        (
            [("optimizer", 1, ("forward", 4), ("backward", 5))],
            {"forward": 4, "backward": 5, "optimizer": 1},
        ),
    ],
    ids=["twice", "exchange", "closure"],
)
def test_spans_of_one_phase_add_up_and_those_inside_another_count_alone(hand, spans, found):
    _, recorder, step = hand
    step(*spans)
    assert medians(recorder) == found


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "wait": st.floats(0, 100),
                "idle": st.floats(0, 100),
                "forward": st.floats(0.01, 100),
                "backward": st.floats(0.01, 100),
            }
        ),
        min_size=1,
        max_size=20,
    )
)
def test_a_wait_for_data_while_the_device_works_takes_no_time_of_the_step(steps):
    """The host waits by its own clock and runs ahead of the device.

    Only the part of its wait in which the device was idle counts.
    """
    device, recorder, _ = made()
    host = recorder._host = HandClock()
    for spans in steps:
        start = device.mark()
        recorder.begin("data")
        host.now += spans["wait"]
        device.now += spans["idle"]
        recorder.end("data")
        for phase in ("forward", "backward"):
            recorder.begin(phase)
            device.now += spans[phase]
            recorder.end(phase)
        recorder.step(start, device.mark())
    summary = recorder.summary()
    assert sum(phase.share for phase in summary.values()) == pytest.approx(1.0)
    assert summary["data"].share == pytest.approx(sum(min(s["wait"], s["idle"]) for s in steps) / device.now)


def test_an_end_without_a_start_is_ignored(hand):
    _, recorder, step = hand
    recorder.end("forward")
    step(backward=1)
    assert recorder.summary()["forward"].median_ms == 0


def test_reset_drops_open_and_completed_phases(hand):
    clock, recorder, step = hand
    step(forward=100)
    recorder.begin("backward")
    recorder.reset()
    clock.now += 1000
    recorder.end("backward")
    assert recorder.summary() == {}
    step(forward=1)
    assert recorder.summary()["forward"].median_ms == 1


def test_a_long_run_keeps_its_last_steps(hand):
    _, recorder, step = hand
    for _ in range(MAX_STEPS):
        step(forward=1)
    for _ in range(MAX_STEPS):
        step(forward=9)
    assert recorder.summary()["forward"].low_ms == 9


def test_the_device_is_waited_for_once_and_at_the_end(hand):
    clock, recorder, step = hand
    for _ in range(10):
        step(forward=1, backward=1)
    assert clock.settled == 0
    recorder.summary()
    assert clock.settled == 1


# -- the real clocks


def test_the_host_clock_counts_milliseconds_and_never_goes_back():
    clock = HostClock()
    marks = [clock.mark() for _ in range(100)]
    assert marks == sorted(marks)
    assert clock.elapsed_ms(0, 2_500_000) == 2.5
    first, used = seconds(), cpu_seconds()
    sum(range(100_000))
    assert seconds() >= first
    assert cpu_seconds() >= used
