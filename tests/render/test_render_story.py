"""The words and figures that both views share."""

from __future__ import annotations

import math

import pytest

from flatout.render import before_after, formatting, summary
from flatout.render.svg import Scale, element, ratio_scale, ratio_ticks, round_ticks
from flatout.schema.records import Ratio


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (formatting.figure(412.6), "413"),
        (formatting.figure(0.0312), "0.0312"),
        (formatting.figure(1840.2), "1,840"),
        (formatting.figure(None), "–"),
        (formatting.figure(math.nan), "–"),
        (formatting.figure(True), "–"),
        (formatting.figure(2.4e-7, 2), "2.4e-07"),
        (formatting.short(1.0), "1"),
        (formatting.times(1.3449), "1.34x"),
        (formatting.times(38.21), "38.2x"),
        (formatting.interval(1.2, None), ""),
        (formatting.duration(0.25), "250 ms"),
        (formatting.duration(9.14), "9.1 s"),
        (formatting.duration(59.7), "1 min 00 s"),
        (formatting.duration(3780), "1 h 03 min"),
        (formatting.size(512), "512 bytes"),
        (formatting.size(1_463_812_096), "1.36 GiB"),
        (formatting.signed(-0.04, 1), "0.0"),
        (formatting.signed(-41.0, 1), "−41.0"),
        (formatting.day("2026-11-21T06:26:11+00:00"), "2026-11-21 06:26 UTC"),
        (formatting.day("yesterday"), "yesterday"),
        (formatting.several(1, "step"), "1 step"),
        (formatting.setting(False), "off"),
        (formatting.legible("a\x1bb\ud800c\u202ed\te"), "a\ufffdb\ufffdc\ufffdd\te"),
        (formatting.legible("x" * 700)[-2:], " …"),
        (formatting.shell(["python", "a  b.py"]), "python 'a  b.py'"),
    ],
)
def test_spelling(said, expected):
    assert said == expected


@pytest.mark.parametrize(
    ("status", "speedup", "verdict", "expected"),
    [
        ("done", Ratio(1.31, 1.28, 1.35, 6), "same", "1.31 times as fast, same results"),
        ("done", Ratio(1.31, 1.28, 1.35, 6), "not checked", "1.31 times as fast, results not checked"),
        ("done", Ratio(1.31, 1.28, 1.35, 6), "failed", "1.31 times as fast, but the results changed"),
        ("done", Ratio(1.04, 0.99, 1.08, 6), "same", "Probably 1.04 times as fast, same results"),
        ("done", Ratio(1.04, 0.97, 1.11, 6), "same", "No faster plan found: run the program as it is"),
        (
            "running",
            Ratio(1.04, 0.99, 1.08, 6),
            "not checked",
            "Still tuning: so far probably 1.04 times as fast, results not checked",
        ),
        (
            "done",
            Ratio(math.nan, math.nan, math.nan, 0),
            "same",
            "No faster plan found: run the program as it is",
        ),
        ("done", None, "not checked", "No faster plan found: run the program as it is"),
        (
            "running",
            Ratio(1.31, 1.28, 1.35, 6),
            "not checked",
            "Still tuning: so far 1.31 times as fast, results not checked",
        ),
        ("failed", None, "not checked", "The tuning failed"),
    ],
)
def test_headline(recorded, status, speedup, verdict, expected):
    session = recorded("session")
    session.status, session.speedup, session.guard.verdict = status, speedup, verdict
    assert summary.headline(session) == expected


@pytest.mark.parametrize(
    ("steps", "warm", "expected"),
    [
        (12, 3120.0, "At step 12: the tuned program warms up for 1.2 s longer, and each step saves 104 ms."),
        (0, 100.0, "From the first step: the plan needs no extra warm-up, and each step saves 104 ms."),
        (None, 3120.0, "The step is not known."),
    ],
)
def test_payback(recorded, steps, warm, expected):
    session = recorded("session")
    session.payback_steps, session.best.warmup_ms = steps, warm
    assert summary.payback_sentence(session) == expected


def test_bars_add_up_to_the_step(recorded):
    session = recorded("session")
    assert sum(part.ms for part in before_after.parts(session.baseline)) == pytest.approx(
        session.baseline.step_ms, rel=0.01
    )


def test_where_the_plain_program_stays_there_is_no_tuned_side(recorded):
    session = recorded("session")
    session.speedup, session.best = None, session.baseline  # what the tuner writes when nothing won
    rows = before_after.before_after(session)
    assert not before_after.both_sides(rows)
    assert [row.plain for row in rows][:2] == ["413 ms", "310 samples/s"]


def test_other_programs_are_named(recorded):
    session = recorded("session")
    assert summary.other_programs(session) == ""
    session.disturbance = "other processes keep 1.0 of 2 cores busy (python (pid 7))"
    assert (
        summary.other_programs(session)
        == f"{session.disturbance}; on an idle machine another plan may be the fastest"
    )


def test_an_unknown_result_is_no_verdict(recorded):
    session = recorded("session")
    session.speedup, session.undecided, session.obstacle = (
        None,
        True,
        "there was no time to measure a lever; give --budget 3m",
    )
    assert summary.headline(session) == "No verdict is possible now"
    session.message = "no verdict is possible now: one pair confirms nothing"
    assert summary.message(session) == "One pair confirms nothing."


@pytest.mark.parametrize(
    ("status", "low", "says"),
    [
        ("applied", 1.1, "faster with the other levers"),
        ("applied", 0.98, "probably faster with the other levers"),
        ("applied", None, "measured only as part of the plan"),
        ("rejected", 1.1, ""),
    ],
)
def test_why_a_lever_is_applied(recorded, status, low, says):
    lever = recorded("session").levers[0]
    lever.status, lever.low, lever.reason = status, low, ""
    assert summary.because(lever).startswith(says) if says else not summary.because(lever)


def test_a_message_of_many_lines_is_a_sentence_and_its_details(recorded):
    session = recorded("failed")
    assert (
        summary.message(session)
        == "The program fails by itself (exit code 1), before flatout changes anything:"
    )
    assert summary.details(session).startswith("Traceback")
    session.message = "it failed:\n" + "x" * 9000 + "\nValueError: the end"
    assert len(summary.details(session)) <= summary.MAX_DETAILS
    assert summary.details(session).endswith("ValueError: the end")


def test_elements_escape_text_and_attributes():
    assert (
        str(element("text", "<b>", class_='a"b', x=1.50)) == '<text class="a&#34;b" x="1.5">&lt;b&gt;</text>'
    )


def test_twice_and_half_as_fast_lie_equally_far_from_one():
    scale = ratio_scale([0.5, 2.0])
    assert scale(2.0) - scale(1.0) == pytest.approx(scale(1.0) - scale(0.5))
    assert 1 in ratio_ticks(scale)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3.2, 7.1), (1e-9, 2e-9), (-1e29, 1e29), (5.0, 5.0), (0, 5e-324)]
)
def test_ticks_lie_between_the_ends(low, high):
    ticks = round_ticks(low, high)
    assert 1 <= len(ticks) <= 12
    assert all(0 <= Scale(low, high)(tick) <= 1 for tick in ticks)
