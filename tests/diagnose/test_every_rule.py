"""Every rule on its own page: it names only the marked lines of Bad, and finds nothing in Good or in the
programs of other pages.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from flatout.diagnose.check import check
from flatout.diagnose.rule import SECTIONS
from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Severity

STATIC = [rule for rule in TABLE if rule.check_source is not None]
NUMBERS = {
    Severity.WRONG: range(1, 100),
    Severity.TIME: range(101, 200),
    Severity.MEMORY: range(201, 300),
    Severity.FRAGILE: range(301, 400),
}


@cache
def found(code):
    """Every (rule, line) found in a program of a page."""
    return tuple((f.rule, f.place.line) for f in check(ScriptProgram.of_text(code)) if f.place is not None)


def marked(code):
    return [number for number, line in enumerate(code.splitlines(), 1) if line.rstrip().endswith("# <-")]


@pytest.mark.parametrize("rule", STATIC, ids=lambda rule: rule.code)
def test_bad_is_found_on_its_lines_alone_and_good_is_clean(rule):
    bad = rule.section("Bad")
    seen = found(bad)
    assert marked(bad), "mark the line"
    assert [line for name, line in seen if name == rule.code] == marked(bad)
    assert {name for name, _ in seen} == {rule.code}
    assert found(rule.section("Good")) == ()


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.code)
def test_page_is_whole(rule):
    assert 0 < len(rule.title) < 90
    assert not rule.page.startswith("\n")
    for name in SECTIONS[:-1] if rule.check_source or rule.invariant else SECTIONS[:3]:
        assert rule.section(name), f"{rule.code} has no section {name}"
    headings = re.findall(r"^(\w[\w ]*):$", rule.page, re.MULTILINE)
    order = (*SECTIONS[:3], "Example", SECTIONS[-1])
    assert headings == [name for name in order if name in headings], "in order, and there is no other"


def test_the_documentation_names_no_other_codes():
    pages = "".join(page.read_text() for page in Path(__file__).parents[2].glob("docs/**/*.md"))
    assert {rule.code for rule in TABLE} >= set(re.findall(r"\bFL\d{3}\b", pages))


def test_table_is_in_order_and_without_doubles():
    codes = [rule.code for rule in TABLE]
    assert codes == sorted(set(codes))
    assert len({rule.name for rule in TABLE}) == len(TABLE)


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.code)
def test_code_says_the_severity(rule):
    assert re.fullmatch(r"FL\d{3}", rule.code)
    assert int(rule.code[2:]) in NUMBERS[rule.severity]
    assert rule.check_source or rule.check_profile or rule.invariant
