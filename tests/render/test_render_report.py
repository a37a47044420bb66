"""The report: every kind of session, and no way for foreign text to become a tag or a request."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.render.report import report_html
from flatout.schema.enums import Effect
from flatout.schema.records import PhaseTime, Ratio
from flatout.schema.session import Prediction, SessionRecord

OURS = frozenset(
    re.findall(
        r"\S+",
        "html head meta title style body main header section footer h1 h2 h3 p ul li strong code pre small span div table thead tbody tr th td figure "
        "figcaption dl dt dd svg g text tspan rect line path circle",
    )
)
RECORD = json.loads((Path(__file__).parent / "session.json").read_text(encoding="utf-8"))
MAX_BYTES = 500_000


class Page(HTMLParser):
    """Parses a page as a browser would, and rejects content that the pages never have."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.count = 0
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count += 1
        assert tag in OURS, f"foreign tag <{tag}>"
        for name, value in attrs:
            assert not name.startswith("on"), f"a handler: {name}={value}"
            assert name not in ("src", "href", "xlink:href", "action", "srcset", "style"), f"{name}={value}"
            assert re.fullmatch(r"[a-z][a-z0-9-]*", name), f"foreign attribute {name}"
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def checked(session: SessionRecord) -> Page:
    html = report_html(session)
    assert len(html.encode()) < MAX_BYTES
    assert not re.search(r"(?:src|href|url\(|@import)\s*[=(\"']?\s*[\"']?https?:", html)
    numbers = " ".join(re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy|width|height|d)="([^"]*)"', html))
    assert not re.search("nan|inf", numbers)
    return Page(html)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "session",
            [
                "1.34 times as fast, equivalent results",
                "flatout run --procs 2 python main.py --lr 0.1",
                "At step 12",
                "0.98–1.01",
                "−4 %",
                "seed 0",
            ],
        ),
        (
            "failed",
            [
                "The tuning failed",
                "FileNotFoundError",
                "2 × NVIDIA H200",
                "flatout tune python -m pkg.train --data '/no/such folder'",
            ],
        ),
        ("empty", ["Still tuning: nothing to report yet"]),
    ],
)
def test_every_session_makes_a_page(recorded, name, words):
    page = checked(recorded(name))
    for word in words:
        assert word in page.text


def test_the_page_shows_every_lever_and_every_comparison(recorded):
    session = recorded("session")
    page = checked(session)
    for lever in session.levers:
        assert lever.name in page.text
        assert lever.reason in page.text
    for comparison in session.comparisons:
        assert comparison.plan in page.text


def test_the_page_explains_each_effect_and_names_levers_with_fewer_bits(recorded):
    """The page has the tuner's sentence from the terminal, and describes the effect of each lever."""
    session = recorded("session")
    session.message = "1.34x (1.30-1.39, n=6) as fast, with the same results up to bfloat16 products"
    for lever, effect in zip(session.levers, Effect, strict=False):
        lever.effect, lever.status = effect.value, "rejected"
    text = checked(session).text
    assert "with the same results up to bfloat16 products" in text
    for words in (
        "stay the same, bit for bit",
        "in the same number format",
        "communication in half precision",
        "different random draws",
    ):
        assert words in text


def test_a_page_that_found_nothing_says_so_and_claims_nothing(recorded):
    session = recorded("session")
    session.speedup, session.ranks = Ratio(1.01, 0.97, 1.05, 24), None
    assert "No faster plan found" in (text := checked(session).text)
    assert "flatout run" not in text
    assert "Break-even" not in text


def test_predictions_are_compared_with_measurements(recorded):
    session = recorded("session")
    assert "Predictions of the profile" not in checked(session).text
    session.predictions = [
        Prediction(
            "FL151",
            "optimizer_share",
            Ratio(1.2, 1.1, 1.3, 9),
            "",
            "fused_optimizer",
            Ratio(1.15, 1.1, 1.2, 9),
        ),
        Prediction("FL150", "data_wait", Ratio(1.8, 1.6, 2.0, 9)),
    ]
    text = checked(session).text
    assert "optimizer share 1.20x (1.10–1.30) 1.15x (1.10–1.20) fused_optimizer" in text
    assert text.index("data wait 1.80x (1.60–2.00) not measured") < text.index("optimizer share"), (
        "the largest predicted gain comes first"
    )


def test_a_failed_guard_never_recommends_the_plan(recorded):
    session = recorded("session")
    session.guard.verdict, session.ranks = "failed", None
    assert "but the results changed" in (text := checked(session).text)
    assert "flatout run" not in text


def test_a_session_that_measured_nothing_describes_no_method(recorded):
    for name in ("failed", "empty"):
        text = checked(recorded(name)).text
        assert "How it was measured" not in text
        assert "still learn the same" not in text


def test_the_policy_allows_the_one_style_sheet_and_nothing_else(recorded):
    html = report_html(recorded("session"))
    style = re.search("<style>(.*)</style>", html, re.DOTALL)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert (
        f"content=\"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'\""
        in html
    )
    assert html.index("Content-Security-Policy") < html.index("<style>")
    assert "<script" not in html
    assert "http" not in style[1]


def test_phases_may_be_records_or_bare_numbers(recorded):
    session = recorded("session")
    session.baseline.phases = {
        "data": PhaseTime(40.0, 38.0, 44.0, 0.1),
        "forward": 120.5,
        "odd": "a word",
        "my phase": {"median_ms": 3.0},
    }
    text = checked(session).text
    assert "120.5" in text
    assert "my phase" in text


@pytest.mark.parametrize("count", [0, 1, 2, 241, 2000])
def test_curves_of_any_length(recorded, count):
    session = recorded("session")
    session.guard.plain_losses = [[2.0 + seed + 1 / (i + 1) for i in range(count)] for seed in range(5)]
    session.guard.tuned_losses = [[2.0 + 1 / (i + 1) for i in range(count)]]
    text = checked(session).text
    assert text.count("Training loss") == 1 + (count > 0)  # one belongs to a lever by name
    assert ("coincide everywhere" in text) == (count > 0)
    assert ("Each point is the mean of 9 losses; 2,000 were compared." in text) == (count == 2000)


def test_nan_losses_are_gaps_and_are_counted(recorded):
    session = recorded("session")
    session.guard.plain_losses = [[3.0, 2.0, 1.5, 1.4]]
    session.guard.tuned_losses = [[3.0, 2.0, math.nan, math.inf]]
    assert (
        "2 of the tuned losses are not finite and not shown; the first is at position 3."
        in checked(session).text
    )
    session.guard.tuned_losses = []
    assert "There is no tuned curve." in checked(session).text


def strings(value: Any, text: str, keep: frozenset[str] = frozenset()) -> Any:
    """The same record with ``text`` for every string: values, items of lists, and the keys of
    free mappings.
    """
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [strings(item, text, keep) for item in value]
    if isinstance(value, dict):
        free = not value.keys() & {
            "command",
            "plan",
            "name",
            "verdict",
            "median",
            "median_ms",
            "step_ms",
            "procs",
        }
        return {
            (f"{text}{key}" if free else key): item if key in keep else strings(item, text, keep)
            for key, item in value.items()
        }
    return value


HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</style></title></svg><script>",
    "{{ 7*7 }}{% for %}",
    "]]><!--",
]
SPICE = ["", "\ud800", "\x1b[31m", "\u202e", "<b a='\">"]  # what generated text seldom contains
WORDS = frozenset({"status", "verdict", "effect", "how"})


@pytest.mark.parametrize("keep", [WORDS, frozenset()], ids=["known words", "no known word"])
@pytest.mark.parametrize("text", HOSTILE)
def test_markup_in_any_field_stays_text(text, keep):
    page = checked(SessionRecord.from_json(strings(RECORD, text, keep)))
    assert " ".join(text.split()) in page.text


@given(
    text=st.text(st.characters(), max_size=40),
    keep=st.sampled_from([WORDS, frozenset()]),
    spice=st.sampled_from(SPICE),
)
def test_any_text_in_any_field(text, keep, spice):
    checked(SessionRecord.from_json(strings(RECORD, text + spice, keep)))


NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.none(),
    st.sampled_from([0, -1, 1, 1e-320, 5e-324, 1e29, 1e300, -1e300, 10**400]),
)


@given(data=st.data())
def test_any_number_in_any_field(data):
    def numbers(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: numbers(item) for key, item in value.items()}
        if isinstance(value, list):
            short = value[:3] if value and isinstance(value[0], float) else value
            return [numbers(item) for item in short]
        return (
            data.draw(NUMBERS) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        )

    checked(SessionRecord.from_json(numbers(copy.deepcopy(RECORD))))
