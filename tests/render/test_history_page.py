"""The page of `flatout ui`: what it joins, what it marks, and its display in a real browser."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from browser import browser, find_browser
from test_render_report import Page

from flatout.render.history_charts import Series, speed_plot
from flatout.render.history_page import history_html
from flatout.schema.compare import Change, Gate
from flatout.schema.history import (
    BaselineSeen,
    ComparisonSeen,
    HistoryRecord,
    JobSeen,
    Origin,
    ProfileSeen,
    RunSeen,
    SessionSeen,
    SkippedFile,
)
from flatout.schema.records import Ratio

HERE = Origin("a CPU, 2 cores", "2.14.1", "cpu")
ELSEWHERE = replace(HERE, machine="another CPU, 8 cores")
WHEN = "2026-11-25T08:00:00Z"
EVIL = "<script>alert(1)</script>\"'&\x1b[31m"


class LinkedPage(Page):
    """A page that may fold, and link to files beside it and to its own parts."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("a", "details", "summary"):
            for name, value in attrs:
                assert name == "href"
                assert re.fullmatch(r"[\w./%-]+|#job-\d+", value or ""), value
            self.open.append(tag)
        elif tag != "br":
            super().handle_starttag(tag, attrs)


def run(at: int, origin: Origin = HERE, **changes: Any) -> RunSeen:
    known = {
        "record": f"job/runs/{at}/rank0.json",
        "created": f"2026-11-{1 + at:02}T08:00:00Z",
        "result": "finished",
        "how": "ended",
        "origin": origin,
        "steps": 100,
        "seconds": 2.0,
        "steps_per_s": 50.0 + at,
        "peak_memory_bytes": 2**29,
        "limited_by": "computing",
    }
    return RunSeen(**{**known, **changes})


def history() -> HistoryRecord:
    """Every part of the page."""
    job = JobSeen(
        "job",
        ["python", "train.py"],
        SessionSeen("s", WHEN, "faster", "1.3x as fast", ELSEWHERE, Ratio(1.3, 1.2, 1.4, 5), ["threads=1"]),
        True,
        [run(0), run(1, result="failed", how="KeyError"), run(2, ELSEWHERE), run(3, low=40.0, high=60.0)]
        + [run(at, levers=["threads=1"]) for at in range(4, 20)],
        ComparisonSeen(
            "c", WHEN, "done", "", HERE, "main", "now", "before", "step", Change(0.1, 0.08, 0.12, 6)
        ),
        ProfileSeen("p", WHEN, "done", "", replace(HERE, torch="2.13.0"), "step", 3.0, "data", "it waits"),
        {"tune": "job/report.html"},
    )
    assert job.comparison is not None
    job.comparison.gates = [Gate("step time", "5 %", "failed", "all above +5 %")]
    return HistoryRecord(
        "/home/me/project/.flatout",
        WHEN,
        "0.1.0",
        HERE,
        [job],
        [BaselineSeen("b.json", "before", ["python", "train.py"], WHEN, ELSEWHERE, "", 3, 4.0)],
        [SkippedFile("job/profile.json", "of a newer flatout")],
    )


def joined(runs: list[RunSeen]) -> list[int]:
    """The number of points of each curve."""
    plot = speed_plot(Series.make(runs))
    assert plot is not None
    return [path.count("L") + 1 for path in re.findall(r'<path d="([^"]*)" class="curve', plot[1])]


def test_a_curve_joins_finished_runs_of_one_origin_only():
    assert joined([run(at) for at in range(4)]) == [4]
    for changed in (
        ELSEWHERE,
        replace(HERE, torch="2.13.0"),
        replace(HERE, device="cuda"),
        replace(HERE, world_size=2),
        replace(HERE, machine=""),
    ):
        assert joined([run(0), run(1), run(2, changed), run(3, changed), run(4, changed)]) == [2, 3]
        assert joined([run(0), run(1, changed)]) == []
    assert joined([run(0), run(1, result="failed"), run(2, result="interrupted"), run(3)]) == [2]


def test_the_page_marks_what_is_of_another_machine_or_torch():
    text = LinkedPage(history_html(history())).text
    for words in (
        "project: 1 command, 20 runs",
        "1.3x as fast. threads=1 · 2026-11-25 08:00 UTC other machine: another CPU, 8 cores",
        "Newest profile a step takes 3.00 ms: it waits. 2026-11-25 08:00 UTC torch 2.13.0",
        "B another CPU, 8 cores, torch 2.14.1, cpu (1 run)",
        "failed: KeyError",
        "53.0 steps/s 40.0 to 60.0",
        "flatout tune python train.py continues it",
        "Gate on step time: failed",
        "4.00 ms 3 2026-11-25 08:00 UTC other machine: another CPU, 8 cores B is slower: +10.0 %",
        "job/profile.json : of a newer flatout.",
    ):
        assert words in text
    local = history()
    local.jobs[0].profile = replace(local.jobs[0].profile, origin=replace(HERE, torch="2.14.1+cpu"))
    assert "UTC torch 2.14.1+cpu" not in LinkedPage(history_html(local)).text  # wheels name it both ways


def test_foreign_text_stays_text():
    def poison(thing: Any) -> Any:
        if isinstance(thing, str):
            return EVIL
        if isinstance(thing, list):
            return [poison(each) for each in thing]
        if isinstance(thing, dict):
            return {EVIL: EVIL}
        if is_dataclass(thing):
            for each in fields(thing):
                thing.__dict__[each.name] = poison(getattr(thing, each.name))
        return thing

    html = history_html(poison(history()))
    LinkedPage(html)
    assert "alert(1)" in html
    assert "<script" not in html


@pytest.mark.processes
def test_a_real_browser_shows_it(tmp_path):
    """No console message, no request but the page, nothing wider than the screen."""
    program = find_browser()
    if program is None:
        pytest.skip("there is no chromium on this machine; no browser has displayed the page")
    path = tmp_path / "index.html"
    path.write_text(history_html(history()), encoding="utf-8")
    with browser(program) as window:
        for width, dark in ((1280, False), (400, True)):
            window.open(path, width, dark)
            assert window.complaints() == []
            assert window.requests() == [path.resolve().as_uri()]
            assert window.value("document.documentElement.scrollWidth") == width
            assert window.value("document.querySelectorAll('svg .run').length") > 2 * 20
