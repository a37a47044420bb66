"""The page of a session: what it says of each outcome, and its words and figures."""

import math
from dataclasses import replace

import pytest
from pages import Parsed, limited, session
from test_pages import shown

from flatout.render import formatting, summary
from flatout.render.page import html
from flatout.render.plot import Scale, element, ratio_scale, ratio_ticks, round_ticks
from flatout.render.report import session_page
from flatout.schema.records import PhaseTime, Ratio
from flatout.schema.session import LeverRecord, SessionOutcome
from flatout.tune.session import verdict


def page_text(record):
    return Parsed(html(session_page(record))).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.rounded(412.6), "413"),
        (formatting.rounded(0.0312), "0.0312"),
        (formatting.rounded(1840.2), "1,840"),
        (formatting.rounded(None), "–"),
        (formatting.rounded(math.nan), "–"),
        (formatting.rounded(True), "–"),
        (formatting.rounded(2.4e-7, 2), "2.4e-07"),
        (formatting.short(1.0), "1"),
        (formatting.factor(1.3449), "1.34x"),
        (formatting.factor(38.21), "38.2x"),
        (formatting.interval(1.2, None), ""),
        (formatting.duration(0.25), "250 ms"),
        (formatting.duration(-4.44e-19), "0 ms"),
        (formatting.milliseconds(4.88e-15), "0 ms"),
        (formatting.milliseconds(2.4e-4), "0.00024 ms"),
        (formatting.duration(9.14), "9.1 s"),
        (formatting.duration(59.7), "1 min 00 s"),
        (formatting.duration(3780), "1 h 03 min"),
        (formatting.size(512), "512 bytes"),
        (formatting.size(1_463_812_096), "1.36 GiB"),
        (formatting.size(math.inf), "–"),
        (formatting.signed(-0.04, 1), "0.0"),
        (formatting.signed(-41.0, 1), "−41.0"),
        (formatting.day("2026-11-21T06:26:11+00:00"), "2026-11-21 06:26 UTC"),
        (formatting.day("yesterday"), "yesterday"),
        (formatting.plural(1, "step"), "1 step"),
        (formatting.setting(False), "off"),
        (formatting.safe_text("a\x1bb\ud800c\u202ed\te"), "a\ufffdb\ufffdc\ufffdd\te"),
        (formatting.safe_text("x" * 700)[-2:], " …"),
        (formatting.shell(["python", "a  b.py"]), "python 'a  b.py'"),
        (str(element("text", "<b>", class_='a"b', x=1.50)), '<text class="a&#34;b" x="1.5">&lt;b&gt;</text>'),
    ],
)
def test_spelling(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("status", "speedup", "verdict", "expected"),
    [
        ("done", Ratio(1.31, 1.28, 1.35, 6), "same", "1.31 times as fast, same results"),
        ("done", Ratio(1.31, 1.28, 1.35, 6), "not checked", "1.31 times as fast, results not checked"),
        ("done", Ratio(1.31, 1.28, 1.35, 6), "failed", "1.31 times as fast, but the results changed"),
        ("done", Ratio(1.04, 0.99, 1.08, 6), "same", "Probably 1.04 times as fast, same results"),
        ("done", Ratio(1.04, 0.97, 1.11, 6), "same", "No faster plan found: run the program as it is"),
        (
            "done",
            Ratio(math.nan, math.nan, math.nan, 0),
            "same",
            "No faster plan found: run the program as it is",
        ),
        ("done", None, "not checked", "No faster plan found: run the program as it is"),
        (
            "running",
            Ratio(1.04, 0.99, 1.08, 6),
            "not checked",
            "Still tuning: so far probably 1.04 times as fast, results not checked",
        ),
        ("failed", None, "not checked", "The tuning failed"),
    ],
)
def test_headline(status, speedup, verdict, expected):
    record = session()
    record.status, record.speedup, record.guard.verdict = status, speedup, verdict
    assert summary.headline(record) == expected
    if "No faster" in expected or verdict == "failed":
        record.ranks = None
        assert "flatout run" not in (text := page_text(record))
        assert "pays back" not in text


@pytest.mark.parametrize(
    ("steps", "warm", "expected"),
    [
        (12, 3120.0, "At step 12: the tuned program warms up for 1.2 s longer, and each step saves 104 ms."),
        (0, 100.0, "From the first step: the plan needs no extra warm-up, and each step saves 104 ms."),
        (None, 3120.0, "The step is not known."),
    ],
)
def test_payback(steps, warm, expected):
    record = session()
    record.payback_steps, record.best.warmup_ms = steps, warm
    assert summary.payback_sentence(record) == expected


def test_the_page_shows_all_and_the_terminal_what_was_used():
    record = limited()
    text, lines = page_text(record), shown(session_page(record))
    for words in (
        "Fits into 100 MiB",
        "flatout run --procs 2 python main.py --lr 0.1",
        "At step 12",
        "−4 %",
        "0.98–1.01",
    ):
        assert words in text
    assert all(lever.name in text and lever.reason in text for lever in record.levers)
    skipped = [lever for lever in record.levers if lever.status == "skipped"]
    assert f"{len(skipped)} levers left out; `flatout levers --why` says why" in lines
    assert not any(lever.reason in line for lever in skipped for line in lines)
    text = "\n".join(lines)
    for words in (
        "malloc=tcmalloc",
        "1.34x (1.30-1.39, n=6)",
        "414 samples/s",
        "-4 %",
        "does not fit",
        "1.05x (1.00-1.11)",
    ):
        assert words in text


def test_a_session_that_measured_nothing_claims_nothing():
    for name in ("failed", "empty"):
        text = page_text(session(name))
        assert "How it was measured" not in text
        assert "still learn the same" not in text
    record = session("failed")
    assert (
        summary.message(record)
        == "The program fails by itself (exit code 1), before flatout changes anything:"
    )
    assert summary.details(record).startswith("Traceback")
    record.message = "it failed:\n" + "x" * 9000 + "\nValueError: the end"
    assert len(summary.details(record)) <= summary.MAX_DETAILS
    assert summary.details(record).endswith("ValueError: the end")


def test_stored_phases_are_shown_and_broken_ones_left_out():
    record = session()
    record.speedup, record.best = None, record.baseline  # what the tuner writes when nothing won
    record.baseline.phases = {
        "data": PhaseTime(40.0, 38.0, 44.0, 0.1),
        "odd": "a word",
        "my phase": {"median_ms": 3.0},
    }
    text = page_text(record)
    assert "The program as it is time of a step 413 ms throughput 310 samples/s" in text
    assert "my phase 3.00 ms" in text
    assert "odd" not in text


@pytest.mark.parametrize("count", [0, 1, 2, 241, 2000])
def test_curves_of_any_length(count):
    record = session()
    record.named_levers = []
    record.guard.plain_losses = [[2.0 + seed + 1 / (i + 1) for i in range(count)] for seed in range(5)]
    record.guard.tuned_losses = [[2.0 + 1 / (i + 1) for i in range(count)]]
    text = page_text(record)
    assert ("The two lines coincide." in text) == (count > 0)
    assert ("Each point is the mean of 9 losses." in text) == (count == 2000)
    record.guard.tuned_losses = [[math.nan, math.inf, *record.guard.tuned_losses[0]]]
    assert ("2 losses of tuned are not finite and not shown." in page_text(record)) == (count > 0)


@pytest.mark.parametrize(
    ("status", "low", "words"),
    [
        ("applied", 1.1, "faster with the other levers"),
        ("applied", 0.98, "probably faster with the other levers"),
        ("applied", None, "measured only as part of the plan"),
        ("rejected", 1.1, ""),
    ],
)
def test_why_a_lever_is_applied(status, low, words):
    reason = summary.lever_reason(LeverRecord("tf32", None, status, 1.2, low))
    assert reason.startswith(words) if words else not reason


def test_more_memory_is_explained():
    record = session()
    record.memory_reason = "cudnn_benchmark: workspaces"
    record.baseline.peak_memory_bytes, record.best.peak_memory_bytes = 262 << 20, 3345 << 20
    assert "+1,177 %" in page_text(record)
    assert "cudnn_benchmark: workspaces" in page_text(record)
    record.best.peak_memory_bytes = 270 << 20
    assert "workspaces" not in page_text(record)


def test_an_unknown_result_is_no_verdict_and_other_programs_are_named():
    record = session()
    assert summary.other_programs(record) == ""
    record.disturbance = "other processes keep 1.0 of 2 cores busy (python (pid 7))"
    record.speedup, record.undecided = None, True
    assert f"{record.disturbance}; on an idle machine another plan may be the fastest" in page_text(record)
    assert summary.headline(record) == "No verdict is possible now"
    record.message = "no verdict is possible now: one pair confirms nothing"
    assert summary.message(record) == "One pair confirms nothing."


def test_a_plan_that_was_measured_beside_other_programs_claims_no_figure():
    record = session()
    record.disturbance = "other processes keep 1.0 of 2 cores busy (python (pid 7))"
    record.speedup = None
    record.message = verdict(record)
    assert record.outcome is SessionOutcome.FASTER
    assert summary.headline(record) == "Faster beside other programs, cannot tell how much"
    assert summary.message(record).startswith(record.disturbance.capitalize())
    assert "flatout run" in summary.next_step(record)[1]
    record = limited()
    record.disturbance, record.speedup = "other processes keep 1.0 of 2 cores busy", None
    assert record.outcome is SessionOutcome.FITS
    assert "beside other programs it is unknown at what speed" in summary.headline(record)
    assert f"does not: {record.disturbance}, " in verdict(record)


def test_ranks_compared_with_one_process():
    ranks = session().ranks
    text = " ".join(shown(session_page(session())))
    for words in ("2 ranks are 1.62 times as fast as one process (1.55-1.70): 81 % of 2 times its",):
        assert words in " ".join(text.split()), words
    for ratio, why_not, words in (
        (Ratio(0.8, 0.7, 0.9, 3), "", "One process is faster here: run without ranks."),
        (Ratio(3.1, 2.9, 3.3, 3), "", "Ranks alone cannot explain that"),
        (None, "one process failed", "2 ranks; one process failed."),
        (None, "", "2 ranks."),
    ):
        assert words in summary.ranks_sentence(replace(ranks, ratio=ratio, why_not=why_not))


def test_scales_and_ticks():
    scale = ratio_scale([0.5, 2.0])
    assert scale(2.0) - scale(1.0) == pytest.approx(scale(1.0) - scale(0.5))
    assert 1 in ratio_ticks(scale)
    for low, high in ((0, 1), (-3.2, 7.1), (1e-9, 2e-9), (-1e29, 1e29), (5.0, 5.0), (0, 5e-324)):
        ticks = round_ticks(low, high)
        assert 1 <= len(ticks) <= 12
        assert all(0 <= Scale(low, high)(tick) <= 1 for tick in ticks)
