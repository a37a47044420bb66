"""The page of a profile: findings first, and every part that was measured."""

import pytest
from pages import Parsed, ill
from test_pages import shown

from flatout.render.page import html
from flatout.render.profile_page import next_step, profile_page


def test_findings_come_with_line_fix_prediction_and_outcome():
    text = Parsed(html(profile_page(ill()))).text
    for words in (
        "Not finite (FL050, wrong result)",
        "train.py:12 in __getitem__ image = decode(self.files[i])",
        "1.80x (1.60–2.00) predicted",
        "Without editing: flatout tune tries cached_prefix",
        "a_folder_with_a_long_name/train.py:47 in main",
        "no roof was measured",
    ):
        assert words in text, words
    assert text.index("Not finite") < text.index("Loss kept with graph") < text.index("Slow fetch")
    assert "/job/" not in text.partition("folder")[0], "places are relative to the folder of the program"


def test_rounding_of_sums_is_no_overlap():
    record = ill()
    record.step_ms, record.idle_ms = 6.5615, 6.5615 - 0.1 - 0.2
    for copying, overlap in ((0.2, ""), (0.25, "0.0500 ms on the device overlap")):
        record.device_ms = {"computing": 0.1, "copying": copying}
        text = Parsed(html(profile_page(record))).text
        assert ("on the device overlap" in text) == bool(overlap)
        assert overlap in text


def test_every_chart_is_drawn():
    page = html(profile_page(ill()))
    for label in (
        "Phases of a step",
        "What-ifs: loader  1.80x",
        "Memory over a step",
        "Memory at the same point of 14 steps",
    ):
        assert f'aria-label="{label}' in page, label


def test_the_terminal_shows_everything_that_was_measured():
    text = "\n".join(shown(profile_page(ill()), 200))
    for words in (
        "A step takes 10.3 ms: arithmetic limits it",
        "1.80x (1.60-2.00) as fast, 5.72 ms a step",
        "not measured: there is no device to copy to.",
        "compute, 60 % of the possible speed",
        "160, 50 us each",
        "0.30 GFLOP a step, 30 % of the measured peak",
        "to device, pageable, non-blocking",
        "90 % of the fetching in train.py:12 in __getitem__",
        "6.00 ms a step; 2.20 ms on the device overlap",
        "is 380 MiB, reached at train.py:44 in main",
        "held by list `losses`, added at train.py:47 in main; it keeps an autograd graph alive",
        "1.02x as long",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("leaking", "command"), [(True, "flatout profile --memory python"), (False, "flatout tune python")]
)
def test_the_next_command(leaking, command):
    record = ill()
    record.tensor_growth.leaking = leaking
    assert next_step(record)[1].startswith(command)
