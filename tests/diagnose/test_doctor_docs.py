"""docs/doctor.md contains the text of every check, and everything that the guide points to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flatout.diagnose.doctor.check import SECTIONS
from flatout.diagnose.doctor.checks import TABLE, THEMES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("question", TABLE, ids=lambda question: question.code)
def test_every_check_is_documented(question):
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    assert f"### {question.code} {question.name.replace('_', ' ')}\n" in page
    for section in SECTIONS:
        assert question.section(section), section
        assert " ".join(question.section(section).split()) in page
    assert question.page.splitlines()[0].endswith(".")
    assert not question.page.splitlines()[1]
    assert question.theme in THEMES


def test_codes_are_given_once():
    assert len({question.code for question in TABLE}) == len(TABLE)
    assert len({question.name for question in TABLE}) == len(TABLE)
    assert all(re.fullmatch(r"FD\d{3}", question.code) for question in TABLE)


def test_the_guide_points_to_what_is_there():
    guide, page = ((DOCS / name).read_text(encoding="utf-8") for name in ("machine.md", "doctor.md"))
    anchors = {re.sub(r"[^a-z0-9 -]", "", line[4:].lower()).replace(" ", "-") for line in page.splitlines() if line.startswith("### ")}
    wanted = set(re.findall(r"doctor\.md#([\w-]+)", guide))
    assert wanted
    assert wanted <= anchors
    assert set(re.findall(r"\(#([\w-]+)\)", page)) <= anchors
