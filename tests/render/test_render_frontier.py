"""Time against memory: the chart and the text for any points."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from flatout.render import summary
from flatout.render.frontier import frontier_plot
from flatout.render.report import report_html
from flatout.render.terminal import print_session
from flatout.schema.records import Ratio
from flatout.schema.session import SessionRecord, TimeMemoryPoint

MIB = 2**20


def limited(**more):
    session = SessionRecord(
        ["python", "train.py"], "", {}, status="done", memory_limit_bytes=100 * MIB, **more
    )
    session.frontier = [
        TimeMemoryPoint("plain", 150 * MIB),
        TimeMemoryPoint("recompute(ops=cheap)", 90 * MIB, Ratio(0.95, 0.9, 1.0, 4), True, True),
        TimeMemoryPoint("recompute(blocks=1.0)", 40 * MIB, Ratio(0.75, 0.7, 0.8, 4), True),
        TimeMemoryPoint("offload", None, note="it failed"),
    ]
    return session


def test_the_chart_marks_the_limit_and_what_was_taken():
    plot = frontier_plot(limited())[1]
    assert plot.count("mark total") == 1
    assert plot.count("mark kept") == 1
    assert plot.count("mark dropped") == 1
    assert "limit 100 MiB" in plot
    dots = [float(x) for x in re.findall(r'<svg x="([\d.]+)%"', plot)]
    line = float(
        re.search(
            r'class="axis limit"|x1="([\d.]+)%" x2="[\d.]+%" y1="0%" y2="100%" class="axis limit"', plot
        )[1]
    )
    assert sorted(dots, reverse=True) == dots  # the largest first
    assert dots[0] > line > dots[1]


def test_the_page_and_the_terminal_show_it():
    session = limited(speedup=Ratio(0.95, 0.9, 1.0, 3))
    session.guard.verdict = "same"
    assert summary.headline(session) == "Fits into 100 MiB, at 0.95 times the speed, same results"
    page = report_html(session)
    assert "Time against memory" in page
    assert "1.05x (1.00–1.11)" in page
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_session(console, session)
    said = console.export_text()
    assert "recompute(ops=cheap)" in said
    assert "does not fit" in said
    assert "flatout run python train.py" in said


@pytest.mark.parametrize("points", [[], [TimeMemoryPoint("plain", 5)]])
def test_few_points_make_no_chart(points):
    session = limited()
    session.frontier = points
    assert frontier_plot(session) is None
    assert "<svg x=" not in report_html(session)


numbers = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.floats(), st.just("many"), st.booleans())


@settings(max_examples=30)
@given(peaks=st.lists(numbers, max_size=4), ratios=st.lists(numbers, min_size=12, max_size=12), limit=numbers)
def test_any_numbers(peaks, ratios, limit):
    session = limited()
    session.frontier = [
        TimeMemoryPoint("<b>x", peak, Ratio(*ratios[3 * at : 3 * at + 3], 3)) for at, peak in enumerate(peaks)
    ]
    session.memory_limit_bytes = limit
    page = report_html(session)
    assert "<b>x" not in page
    assert not re.search(r'(?:x1|y1|cx|cy|x|y)="(?:nan|inf|-inf)', page)
