"""Every invariant on the programs of its own page: it names the marked line of Bad, and nothing in Good."""

import pytest

from flatout.diagnose.rules import TABLE

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

OBSERVED = [rule for rule in TABLE if rule.invariant is not None]
GUARD = "FL305"  # most pages are no scripts with a main guard
BY_COMPARISON = {"FL068"}  # by two runs: tests/cli/test_check.py


def marked(text):
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# <-")]


@pytest.mark.parametrize("rule", OBSERVED, ids=lambda rule: rule.code)
def test_a_page_shows_a_program_that_is_found_and_one_that_is_not(observe, rule):
    bad, good = observe(rule.section("Bad")), observe(rule.section("Good"))
    for seen in (bad, good):
        assert (seen["error"], seen["failed"]) == ("", {})
        if rule.code != GUARD:
            seen["findings"] = [finding for finding in seen["findings"] if finding["rule"] != GUARD]
    assert good["findings"] == []
    if rule.code in BY_COMPARISON:
        return
    own = [finding for finding in bad["findings"] if finding["rule"] == rule.code]
    assert [finding["place"]["line"] for finding in own] == marked(rule.section("Bad"))
    assert len(own) == len(bad["findings"])
