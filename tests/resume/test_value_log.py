"""The value log returns recorded values in the same order, and only to a program with the same
control flow.
"""

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.checkpoint.resume.value_log import LargeValue, ValueJournal, ValueLog, read_journal

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.complex_numbers(allow_nan=False),
    st.lists(st.floats(allow_nan=False), max_size=5),
    st.lists(st.integers(-5, 5), max_size=5).map(lambda row: numpy.array(row, "int32")),
)


class Refused(Exception):
    pass


def refuse(why):
    raise Refused(why)


def recorded(path, way):
    value_log = ValueLog(refuse, print)
    value_log.record(ValueJournal(path))
    go(value_log, way, value_log.put)
    return value_log.write(), value_log.event_count


def go(value_log, way, hand_over):
    found = []
    for what, value in way:
        if what == "value":
            found.append(hand_over(value, len(found) % 7))
        elif what == "event":
            value_log.event(value)
        else:
            value_log.mark()
    return found


def played(path, position, events):
    value_log = ValueLog(refuse, print)
    value_log.replay(read_journal(path, position), events + 1)
    return value_log


WAYS = st.lists(
    st.one_of(
        st.tuples(st.just("value"), PLAIN),
        st.tuples(st.just("event"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.none()),
    ),
    max_size=40,
)


@given(way=WAYS)
def test_the_same_control_flow_gives_the_same_values(tmp_path_factory, way):
    path = tmp_path_factory.mktemp("value_log") / "j"
    value_log = played(path, *recorded(path, way))
    found = go(value_log, way, lambda value, at: value_log.take(at))
    for before, now in zip([value for what, value in way if what == "value"], found, strict=True):
        assert type(before) is type(now)
        assert repr(before) == repr(now)
    assert value_log.event(0)
    value_log.end()
    assert not value_log.replaying


@given(way=WAYS, more=st.integers(0, 9))
def test_a_different_event_is_detected_at_the_end_of_the_step(tmp_path_factory, way, more):
    path = tmp_path_factory.mktemp("value_log") / "j"
    value_log = played(path, *recorded(path, [*way, ("step", None)]))
    value_log.event(more)
    with pytest.raises(Refused, match=r"another path|more values than"):
        go(value_log, [*way, ("step", None)], lambda value, at: value_log.take(at))


def test_extra_or_missing_values_are_detected(tmp_path):
    position, events = recorded(tmp_path / "j", [("value", 1.0), ("value", 2.0)])
    value_log = played(tmp_path / "j", position, events)
    assert value_log.take(0) == 1.0
    with pytest.raises(Refused, match="has not read 1 of the values"):
        value_log.end()
    assert value_log.take(1) == 2.0
    with pytest.raises(Refused, match="more values than in the first run"):
        value_log.take(2)


def test_exceptions_and_large_values(tmp_path):
    value_log = ValueLog(refuse, print)
    value_log.record(ValueJournal(tmp_path / "j"))
    value_log.put(ValueError("of two"), 1)
    value_log.put(numpy.random.default_rng(0).random(1 << 20), 2)
    value_log.put([1.0] * 100, 2, recomputed=True)
    value_log.put(math.nan, 3)
    value_log = played(tmp_path / "j", value_log.write(), 0)
    error = value_log.take(1)
    assert type(error) is ValueError
    assert str(error) == "of two"
    assert isinstance(value_log.take(2), LargeValue)
    assert isinstance(value_log.take(2), LargeValue)
    assert math.isnan(value_log.take(3))


def test_other_threads_and_flatout_itself_are_not_recorded(tmp_path):
    from threading import Thread

    value_log, observed = ValueLog(refuse, print), []
    assert value_log.observes
    thread = Thread(target=lambda: observed.append(value_log.observes))
    thread.start()
    thread.join()
    value_log.paused += 1
    assert observed == [False]
    assert not value_log.observes
