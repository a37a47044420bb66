"""`--json`: one document on standard output that its published schema describes."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from schemas import PUBLISHED, json_schema

import flatout as package
from flatout.cli.options.output import print_json
from flatout.diagnose.doctor.checks import run_checks
from flatout.schema.machine_snapshot import MachineSnapshot
from flatout.schema.outputs import DoctorRecord
from flatout.schema.session import SessionOutcome, SessionRecord

pytestmark = pytest.mark.timeout(60)

RECORDED = Path(__file__).parent.parent / "render" / "session.json"
NAMED = {
    "check": "findings",
    "profile": "profile",
    "tune": "session",
    "run": "run",
    "explain": "explanations",
}
SNAPSHOTS = Path(__file__).parent.parent / "diagnose" / "recorded"


@pytest.fixture
def valid():
    """``valid(name, text)`` parses the text strictly and checks it against its schema."""

    def check(name, text):
        data = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert [each.message for each in Draft202012Validator(json_schema(name)).iter_errors(data)] == []
        return data

    return check


@pytest.fixture
def job(flatout):
    folder = flatout.folder / ".flatout" / "train-01234567"
    folder.mkdir(parents=True)
    (folder / "session.json").write_text(RECORDED.read_text())
    (folder / "flatout.toml").write_text("[levers]\nchannels_last = true\nof_tomorrow = 3\n")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_schema_describes_its_record_and_no_other(name):
    schema = json_schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"] == {"const": PUBLISHED[name].number}
    assert not Draft202012Validator(schema).is_valid({"schema": PUBLISHED[name].number + 1})
    assert not Draft202012Validator(schema).is_valid([])


def test_a_recorded_session_fits_its_schema(valid):
    data = valid("session", RECORDED.read_text())
    assert data["speedup"]["median"]
    data["speedup"]["median"] = "fast"
    errors = Draft202012Validator(json_schema("session")).iter_errors(data)
    assert [list(each.absolute_path) for each in errors] == [["speedup"]]


@pytest.mark.parametrize(
    ("words", "name", "code"),
    [
        ("levers", "levers", 0),
        ("levers tf32", "levers", 0),
        ("plan --plan .flatout/train-01234567/flatout.toml", "plan", 0),
        ("plan --template", "plan", 0),
        ("explain --list", "pages", 0),
        ("explain FE001", "pages", 0),
        ("explain nothing that is known", "explanations", 1),
        ("check --explain FL001", "pages", 0),
    ],
)
def test_what_commands_print(flatout, valid, job, words, name, code):
    command, *rest = words.split()
    done = flatout.here(command, "--json", *rest)
    assert done.code == code, done.err
    valid(name, done.out)


def test_findings_and_explanations(flatout, valid, script):
    script("import torch\nmodel = torch.nn.Linear(1, 1)\nx = torch.nn.Softmax()(model(torch.ones(1, 1)))\n")
    done = flatout.here("check", "--json", "train.py")
    assert valid("findings", done.out)["files"] == ["train.py"]
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10)"
    (found,) = valid("explanations", flatout.here("explain", "--json", error).out)["explanations"]
    assert found["rule"].startswith("FE")


def test_a_failure_prints_no_record(flatout):
    for words in (("levers", "--json", "nonesuch"), ("plan", "--json")):
        done = flatout.here(*words)
        assert (done.code, done.out) == (2, ""), words


@pytest.mark.processes
def test_a_trial_prints_its_record_alone(flatout, valid, script, by_hand):
    """What the program prints goes to standard error."""
    script(by_hand)
    done = flatout("trial", "--json", "--steps", "5", "python", "train.py")
    assert done.code == 0, done.err
    assert valid("trial", done.out)["steps"] == 5
    assert "loss 0 " in done.err


@pytest.mark.parametrize("path", sorted(SNAPSHOTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_checks_of_a_recorded_machine(valid, capsys, path):
    snapshot = MachineSnapshot.from_json(json.loads(path.read_text()))
    print_json(DoctorRecord(snapshot, run_checks(snapshot)))
    assert valid("doctor", capsys.readouterr().out)["checks"]


def test_numbers_that_are_not_finite(flatout, valid, job, capsys):
    data = json.loads(RECORDED.read_text())
    data["guard"]["plain_losses"] = [[1.0, float("nan"), float("inf")]]
    print_json(SessionRecord.from_json(data))
    assert valid("session", capsys.readouterr().out)["guard"]["plain_losses"] == [[1.0, None, None]]


def test_the_skill_names_what_exists(flatout):
    """It is a skill file, and the fields that it names are in the schemas."""
    text = flatout.here("skill").out
    assert text == (Path(package.__file__).parent / "cli" / "skill.md").read_text()
    _, front, _ = text.split("---\n", 2)
    assert [line.partition(":")[0] for line in front.splitlines()] == ["name", "description"]
    outcomes = re.findall(r"^\| `([a-z]+)` \| ", text.split("## How to read a verdict")[1], re.MULTILINE)
    assert {*outcomes} == {*SessionOutcome, "outcome"} - {SessionOutcome.RUNNING}
    for command, name in NAMED.items():
        part = text.split(f". `flatout {command} ", 1)[1].split("\n#", 1)[0]
        bullets = [line for line in part.splitlines() if line.startswith("* ")]
        words = re.findall(r"`([a-z_.]+)(?:\[\])?`", re.sub(r"\([^)]*\)", "", " ".join(bullets)))
        fields = {field for word in words for field in word.split(".")}
        known = json.dumps(json_schema(name))
        assert len(fields) > 3
        assert {field for field in fields if f'"{field}": ' not in known} == set()
