"""Findings in three forms: for users, for programs and for GitHub."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flatout.diagnose.check import check
from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram
from flatout.render.findings import finding_lines, github_lines
from flatout.schema.findings import Finding, Severity, SourceLocation
from flatout.schema.outputs import FindingsRecord

PLACE = SourceLocation("my train.py", 3, 5, "Net.forward", "x = y.item()", 4)
FOUND = [
    Finding(
        "FL001",
        "zero_grad_missing",
        Severity.WRONG.value,
        "never cleared: 100% wrong,\nsaid in two lines",
        PLACE,
        fix="a()\nb()",
        others=[SourceLocation("b.py", 7)],
    ),
    Finding(
        "FL101",
        "host_sync_every_step",
        Severity.TIME.value,
        "waits [red]always[/red]",
        PLACE,
        levers=["loader"],
    ),
    Finding("FD001", "no_place", Severity.FRAGILE.value, "has no place"),
]


def shown(findings, width=100):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, soft_wrap=True).print(
        finding_lines(findings, {"FL001": "Gradients"})
    )
    return out.getvalue()


def test_the_caret_stands_under_its_column():
    lines = shown(FOUND).splitlines()
    at = lines.index("      x = y.item()")
    assert lines[at + 1] == "      ^"
    far = Finding(
        "FL001",
        "a",
        Severity.WRONG.value,
        "far",
        SourceLocation("a.py", 1, 5 + 400, "", "y" * 400 + "Z" + "y" * 400, 4),
    )
    line, caret = shown([far]).splitlines()[4:6]
    assert line[caret.index("^")] == "Z"
    assert len(line) < 200


def test_foreign_text_is_shown_and_not_interpreted():
    text = shown(
        [
            Finding(
                "FL001",
                "a",
                Severity.WRONG.value,
                "[bold]x\x1b[2J",
                SourceLocation("\x1b[31ma.py", 1, 1, "", "\x1b]0;title\x07"),
            )
        ]
    )
    assert "\x1b" not in text
    assert "[bold]x" in text


def test_json_gives_the_findings_back():
    read = json.loads(json.dumps(FindingsRecord(["a.py"], [], FOUND).to_json()))
    assert [Finding.from_json(each) for each in read["findings"]] == FOUND


def test_github_commands_are_one_line_each_and_escaped():
    lines = list(github_lines(FOUND))
    assert len(lines) == 3
    assert all("\n" not in line for line in lines)
    assert lines[0].startswith(
        "::error title=FL001 zero_grad_missing,file=my train.py,line=3,col=5::never cleared: 100%25 wrong,"
    )
    assert "%0Aa()%0Ab()" in lines[0]
    assert [line.split()[0] for line in lines] == ["::error", "::warning", "::notice"]


@pytest.mark.parametrize("rule", [rule for rule in TABLE if rule.check_source], ids=lambda rule: rule.code)
def test_every_rules_finding_goes_through_every_form(rule):
    found = check(ScriptProgram.of_text(rule.section("Bad")))
    assert shown(found)
    assert len(list(github_lines(found))) == len(found)
    for finding in found:
        assert finding.message[0] != " "
        assert len(finding.message) < 250
        assert finding.fix, "say what to do"


@given(st.text(), st.text(), st.integers(0, 500), st.integers(0, 80))
def test_no_text_breaks_a_form(said, line, column, indent):
    finding = Finding(
        "FL001",
        "a",
        Severity.WRONG.value,
        said,
        SourceLocation("a.py", 1, column, "", line, indent),
        fix=said,
    )
    assert shown([finding])
    assert "\n" not in next(iter(github_lines([finding])))
