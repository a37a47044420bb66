"""`flatout fix` edits what has a certain fix, and nothing else; the losses stay, or change as the rule says."""

import json

import pytest
from click.testing import CliRunner

from flatout.cli.main import flatout
from flatout.diagnose.check import check
from flatout.diagnose.fix import fixes
from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram

FIXABLE = [rule for rule in TABLE if rule.fix_changes is not None]
HEAD = "import gc, torch\nkept = []\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


def fixed(text, code):
    program = ScriptProgram.of_text(text)
    (changed,) = fixes(program, check(program, [code]))
    assert not changed[0].not_fixed
    return changed[1]


def step(*lines):
    loop = [
        "for _ in range(9):",
        "    loss = model(torch.randn(2, 4)).sum()",
        *(f"    {line}" for line in lines),
    ]
    return HEAD + "\n".join(loop) + "\n"


@pytest.mark.parametrize("rule", FIXABLE, ids=lambda rule: rule.code)
def test_the_fixed_program_has_the_finding_no_more(rule):
    found = check(ScriptProgram.of_text(rule.section("Bad")), [rule.code])
    left = [finding.place.text for finding in found if not finding.edits]
    assert len(left) < len(found)
    again = check(ScriptProgram.of_text(fixed(rule.section("Bad"), rule.code)), [rule.code])
    assert [finding.place.text for finding in again] == left


WRITTEN = [
    (
        "FL028",
        "loss.backward()\noptimizer.zero_grad  # of all",
        "loss.backward()\noptimizer.zero_grad()  # of all",
    ),
    (
        "FL303",
        'model.load_state_dict(torch.load("é.pt"))  # cuda\nmodel.cuda()',
        'model.load_state_dict(torch.load("é.pt", map_location="cpu"))  # cuda\nmodel.cuda()',
    ),
]


@pytest.mark.parametrize(("code", "before", "after"), WRITTEN)
def test_the_rest_of_the_line_stays_as_it_is_written(code, before, after):
    before, after = (step(*lines.split("\n"), "optimizer.step()") for lines in (before, after))
    assert fixed(before, code) == after


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("path", 'path, map_location="cpu"'),
        ("path,", 'path, map_location="cpu"'),
        ("\n    path,  # ours\n", '\n    path,\n    map_location="cpu",  # ours\n'),
    ],
)
def test_an_argument_is_added_in_the_style_of_the_call(arguments, expected):
    text = f"{HEAD}model.cuda()\nmodel.load_state_dict(torch.load({arguments}))\n"
    assert fixed(text, "FL303") == text.replace(f"torch.load({arguments})", f"torch.load({expected})")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = step("optimizer.zero_grad", "loss.backward()", "optimizer.step()")
    text += 'model.cuda().load_state_dict(torch.load("a.pt"))\n'
    path = tmp_path / "train.py"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    path.chmod(0o754)
    return path


def test_the_page_of_a_rule_says_what_its_edit_changes():
    for code, words in (
        ("FL303", "all losses stay the same"),
        ("FL028", "It changes: the call takes effect."),
    ):
        done = CliRunner().invoke(flatout, ["check", "--explain", code], standalone_mode=False)
        assert words in done.output
    assert "flatout fix" not in CliRunner().invoke(flatout, ["check", "--explain", "FL115"]).output


def test_without_apply_only_a_diff_is_printed(script):
    before = script.read_bytes()
    done = CliRunner().invoke(flatout, ["fix", "train.py"], standalone_mode=False)
    assert done.return_value == 1
    assert '+model.cuda().load_state_dict(torch.load("a.pt", map_location="cpu"))' in done.stdout
    assert "optimizer.zero_grad()" not in done.stdout, "it changes what the program learns"
    assert "1 finding would change what the program learns when fixed: add --all" in done.stderr
    assert script.read_bytes() == before


def test_apply_keeps_the_bytes_around_and_the_mode(script):
    before = script.read_bytes()
    done = CliRunner().invoke(flatout, ["fix", "--apply", "--all", "train.py"], standalone_mode=False)
    assert done.return_value == 0
    assert "the call takes effect" in done.stderr
    expected = before.replace(b'("a.pt")', b'("a.pt", map_location="cpu")').replace(
        b"zero_grad\r", b"zero_grad()\r"
    )
    assert script.read_bytes() == expected
    assert script.stat().st_mode & 0o777 == 0o754
    again = CliRunner().invoke(flatout, ["fix", "--all", "train.py"], standalone_mode=False)
    assert again.return_value == 0
    assert again.stdout == ""


def test_json_has_the_diff_and_the_findings(script):
    done = CliRunner().invoke(flatout, ["fix", "--json", "train.py"], standalone_mode=False)
    record = json.loads(done.stdout)
    assert [each["rule"] for each in record["files"][0]["fixed"]] == ["FL303"]
    assert record["applied"] is False
    assert record["files"][0]["diff"].startswith("--- train.py")
