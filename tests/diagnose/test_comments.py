"""Selecting rules, suppressing them with comments, and the order of findings."""

import pytest

from flatout.diagnose.check import check
from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram
from flatout.schema.errors import UsageError

SAVES = 'import torch\nmodel = torch.nn.Linear(4, 1)\ntorch.no_grad(){}\nx = torch.load("a.pt", weights_only=False){}\n'


def codes(text, **options):
    return [finding.rule for finding in check(ScriptProgram.of_text(text), **options)]


@pytest.mark.parametrize(
    ("comments", "left"),
    [
        (("  # flatout: ignore FL029", ""), ["FL304"]),
        (("  # flatout: ignore fl029", ""), ["FL304"]),
        (("  # flatout: ignore", "  # flatout: ignore FL304, FL029"), ["FL349"][:0]),
        (("  # flatout: ignore FL304", ""), ["FL029", "FL304", "FL349"]),
        (("  # flatout: ignore FL999", ""), ["FL029", "FL304", "FL349"]),
        (("\n# flatout: ignore FL304", ""), ["FL029"]),
        (("  # flatout: ignored some day", ""), ["FL029", "FL304"]),
        (("; s = '# flatout: ignore FL029'", ""), ["FL029", "FL304"]),
    ],
    ids=[
        "code",
        "small letters",
        "all, and a list",
        "another code",
        "unknown code",
        "line above",
        "another word",
        "in a string",
    ],
)
def test_comments_hide_what_they_name(comments, left):
    assert sorted(codes(SAVES.format(*comments))) == left


def test_an_unused_comment_is_reported_only_where_its_rule_is_selected():
    text = "import torch  # flatout: ignore FL029\n"
    assert codes(text) == ["FL349"]
    assert codes(text, select=["FL304", "FL349"]) == []
    assert codes(text, ignore=["FL349"]) == []


def test_select_and_ignore_take_prefixes_of_codes():
    text = SAVES.format("", "")
    assert codes(text, select=["FL"]) == ["FL029", "FL304"]
    assert codes(text, select=["FL1", "FL304"]) == ["FL304"]
    assert codes(text, ignore=["FL30", "FL0"]) == []
    with pytest.raises(UsageError, match="FL9"):
        codes(text, select=["FL9"])


def test_worst_first_then_by_line():
    text = "\n\n".join(
        rule.section("Bad").replace("# <-", "") for rule in TABLE if rule.code in ("FL304", "FL029", "FL028")
    )
    found = check(ScriptProgram.of_text(text))
    kinds = ["wrong result", "wasted time", "wasted memory", "fragile"]
    assert [f.severity for f in found] == sorted((f.severity for f in found), key=kinds.index)
    assert {f.rule for f in found} == {"FL304", "FL029", "FL028"}
