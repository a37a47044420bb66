"""The page of a profile: its contents, its protection from foreign text, and its display in a
real browser.
"""

from __future__ import annotations

import copy
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from browser import browser, find_browser
from profiles import GAIN, ILL, LINE, healthy, what_ifs
from test_render_report import Page

from flatout.diagnose.ranking import judge
from flatout.render.profile_report import profile_html
from flatout.schema.profile import MemoryGrowth, ProfileRecord, SyncRecord
from flatout.schema.records import Ratio

GROWS = [2.0**26 + 98_000 * i + 20_000 * (i % 3) for i in range(14)]


def ill() -> ProfileRecord:
    """A profile with several faults, so that every part of the page is present."""
    changes = {
        **ILL["slow_fetch"][0],
        **ILL["not_finite"][0],
        "what_ifs": what_ifs(loader=GAIN, syncs=Ratio(1.3, 1.2, 1.4, 20)),
        "synchronisations": [
            SyncRecord("item", LINE, 2.0, 2.4),
            SyncRecord("to device", LINE, 1.0, 0.2, 2**20, False, True),
        ],
        "leak": MemoryGrowth(98_000, 1e-6, True, "list `losses`", LINE, graph=True, steps=14, series=GROWS),
        "notes": ["no roof was measured"],
        "device_ms": {"computing": 6.0, "copies": 2.0, "communication": 3.0},
        "idle_ms": 1.5,
    }
    record = healthy(**changes)
    record.findings = judge(record)
    found = {finding.name: finding for finding in record.findings}
    found["slow_fetch"].measured = Ratio(1.7, 1.6, 1.8, 6)
    # As long as real ones are: they must not make a page wider than its screen.
    found["loss_kept_with_graph"].place = replace(
        LINE, file="/job/" + "a_folder_with_a_long_name/" * 4 + "train.py", text="x" * 150
    )
    found["loss_kept_with_graph"].evidence.append("y" * 200)
    return record


def words_of(record: ProfileRecord) -> str:
    return " ".join(Page(profile_html(record)).words)


def test_findings_come_with_line_fix_prediction_and_outcome():
    page = words_of(ill())
    for words in (
        "Not finite",
        "FL161",
        "train.py:12 in __getitem__",
        "image = decode(self.files[i])",
        "1.80x (1.60–2.00) predicted, 1.70x (1.60–1.80) measured",
        "cached_prefix",
        "list `losses`",
        "a_folder_with_a_long_name/train.py:47 in main",
        "no roof was measured",
    ):
        assert words in page, words
    assert page.index("Not finite") < page.index("Loss kept with graph") < page.index("Slow fetch")


def test_places_are_relative_to_the_folder_of_the_program():
    assert "/job/" not in words_of(ill()).partition("folder")[0]


def test_every_chart_is_drawn():
    html = profile_html(ill())
    for label in (
        "Phases of a step",
        "Beside the step: ",
        "loader: 1.80x",
        "Roofline: ",
        "What fills the peak",
        "Memory over a step",
        "Memory at the same point of 14 steps",
    ):
        assert f'aria-label="{label}' in html, label


def test_the_roof_is_drawn_only_where_it_was_measured():
    with_roof, without = healthy(), healthy(ceilings={})
    assert 'class="roof"' in profile_html(with_roof)
    assert 'class="roof"' not in profile_html(without)
    assert "flatout doctor --bench" in profile_html(without)


@pytest.mark.parametrize(
    "record",
    [ProfileRecord([], ""), ProfileRecord(["a"], "/", status="failed", message="it ended"), healthy()],
    ids=["empty", "failed", "healthy"],
)
def test_less_makes_a_shorter_page(record):
    page = words_of(record)
    assert "Findings" not in page
    assert ("could not be profiled" in page) == (record.status == "failed")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, -1.0, 0.0])
def test_numbers_that_cannot_be_drawn_do_no_harm(value):
    record = ill()
    for operation in record.operations:
        operation.flops = operation.moved_bytes = operation.host_ms = value
    for w in record.what_ifs:
        if w.ratio:
            w.ratio.low = value
    assert record.leak is not None
    record.leak.series = [value] * 5
    html = profile_html(record)
    Page(html)
    assert not re.search(
        r"(?<![-\w])(nan|inf)(?![-\w])", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    )


def test_foreign_text_stays_text():
    evil = "<script>alert(1)</script>\"'&\x1b[31m"

    def poison(thing: Any) -> Any:
        if isinstance(thing, str):
            return evil
        if isinstance(thing, list):
            return [poison(each) for each in thing]
        if isinstance(thing, dict):
            return {key: poison(value) for key, value in thing.items()}
        if is_dataclass(thing):
            for each in fields(thing):
                if each.name not in ("status", "severity"):
                    thing.__dict__[each.name] = poison(getattr(thing, each.name))
        return thing

    html = profile_html(poison(copy.deepcopy(ill())))
    Page(html)  # rejects unknown tags
    assert "alert(1)" in html
    assert "<script" not in html


@pytest.mark.processes
def test_a_real_browser_shows_it(tmp_path):
    """Light and dark, on a wide and on a narrow screen: no console message, no request except the page
    itself, nothing cut off.
    """
    program = find_browser()
    if program is None:
        pytest.skip("there is no chromium on this machine; no browser has displayed the page")
    path = tmp_path / "report.html"
    path.write_text(profile_html(ill()), encoding="utf-8")
    seen = set()
    with browser(program) as window:
        for width in (1280, 400):
            for dark in (False, True):
                window.open(path, width, dark)
                assert window.complaints() == []
                assert window.requests() == [path.resolve().as_uri()]
                assert window.value("document.documentElement.scrollWidth") == width, (
                    "something is wider than the screen"
                )
                assert window.value("document.querySelectorAll('svg').length") > 8
                background, ink = window.value(
                    "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
                )
                assert (
                    sum(map(int, re.findall(r"\d+", background))) < sum(map(int, re.findall(r"\d+", ink)))
                ) == dark
                seen.add(window.screenshot(tmp_path / f"{width}_{dark}.png").read_bytes())
    assert len(seen) == 4, "two of the four charts are the same"
