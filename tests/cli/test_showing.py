"""`flatout levers`, `plan` and `report`, and the help of the command."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

import flatout as package
from flatout.levers import TABLE
from flatout.plan.plan import Plan

pytestmark = pytest.mark.timeout(60)

RECORDED = Path(__file__).parent.parent / "render" / "session.json"


@pytest.mark.processes
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_every_command(flatout, word):
    done = flatout(word)
    assert done.code == 0
    for command in (
        "tune",
        "run",
        "profile",
        "check",
        "explain",
        "doctor",
        "trial",
        "plan",
        "report",
        "levers",
    ):
        assert f"\n  {command} " in done.out
        helped = flatout.here(command, word)
        assert helped.code == 0
        assert helped.out.startswith("Usage: ")


@pytest.mark.processes
def test_version(flatout):
    assert flatout("--version").out == f"flatout, version {package.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        "nonesuch",
        "tun python",
        "levers nonesuch",
        "levers a b",
        "plan --nonesuch",
        "report nonesuch",
        "report",
        "levers --why",
    ],
)
def test_mistakes_exit_with_two_and_a_message(flatout, words):
    done = flatout.here(*words.split())
    assert done.code in (2, 127)
    assert "Traceback" not in done.err
    assert done.out == ""
    assert len(done.err.strip()) > 20


def test_levers_are_listed_in_the_order_in_which_they_act(flatout):
    done = flatout.here("levers", env={"COLUMNS": "200"})
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()[1:]]
    assert [line[0] for line in lines] == [lever.name for lever in TABLE]
    for line, lever in zip(lines, TABLE, strict=True):
        assert line[1] == lever.effect.value


def test_why_levers_were_left_out_of_the_newest_session(flatout):
    left_out = [lever for lever in json.loads(RECORDED.read_text())["levers"] if lever["status"] == "skipped"]
    for name in ("older", "newer"):
        folder = flatout.folder / ".flatout" / name
        folder.mkdir(parents=True)
        (folder / "session.json").write_text(RECORDED.read_text() if name == "newer" else "{}")
        os.utime(folder / "session.json", (0, 0) if name == "older" else None)
    for words in (("--why",), ("--why", "--job", ".flatout/newer"), ("--job", ".flatout/newer")):
        done = flatout.here("levers", *words, env={"COLUMNS": "200"})
        assert done.code == 0
        assert all(f"{lever['name']} " in done.out and lever["reason"] in done.out for lever in left_out)
        assert len(done.out.splitlines()) == len(left_out)
    assert flatout.here("levers", "--job", ".flatout/older").code == 2


@pytest.mark.parametrize("lever", TABLE, ids=lambda lever: lever.name)
def test_the_page_of_a_lever(lever):
    from click.testing import CliRunner

    from flatout.cli.main import flatout

    shown = CliRunner().invoke(flatout, ["levers", lever.name])
    assert shown.exit_code == 0
    assert shown.output == lever.page.strip() + "\n"


@pytest.mark.processes
def test_the_page_through_the_command(flatout):
    assert flatout("levers", "tf32").out.startswith("Use the TF32 mode of the Tensor Cores")


# -- plan -----------------------------------------------------------------------------------------------------------


def test_the_template_is_a_plan(flatout):
    done = flatout.here("plan", "--template")
    assert tomllib.loads(done.out)["schema"] == 1
    assert {choice.name for choice in Plan.from_toml(done.out)} <= {lever.name for lever in TABLE}


def test_a_plan_is_shown_with_its_code_and_evidence(flatout):
    (flatout.folder / "flatout.toml").write_text(
        '[levers.channels_last]\nvalue = true\norigin = "tuner"\nevidence = "alone 1.30x (1.20-1.40, n=6)"\n[levers.of_tomorrow]\nvalue = 3\n'
    )
    for done in (flatout.here("plan"), flatout.here("plan", "--plan", "flatout.toml")):
        assert done.code == 0, done.err
        assert "channels_last" in done.out
        assert "1.30x (1.20-1.40, n=6)" in done.out
        assert "model.to(memory_format=torch.channels_last)" in done.out
        assert "of_tomorrow" in done.out  # unknown here, but shown


@pytest.mark.parametrize("content", ["[levers", "schema = 7", "threads = 1"])
def test_a_broken_plan(flatout, content):
    (flatout.folder / "flatout.toml").write_text(content)
    done = flatout.here("plan")
    assert done.code == 2
    assert done.said[0].startswith("flatout: flatout.toml")


def test_no_plan(flatout, script):
    script("pass")
    for words in ((), ("python", "train.py"), ("--plan", "missing.toml")):
        done = flatout.here("plan", *words)
        assert done.code == 2
        assert "flatout tune" in done.said[0]


# -- report ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(flatout):
    folder = flatout.folder / ".flatout" / "train-01234567"
    folder.mkdir(parents=True)
    shutil.copy(RECORDED, folder / "session.json")
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("named", [True, False])
def test_the_report_is_written_again(flatout, job, named):
    done = flatout("report", *([str(job)] if named else []))
    assert done.code == 0
    assert (flatout.folder / done.out.strip()).resolve() == (job / "report.html").resolve()
    assert (job / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": 99}',
        b'{"schema": 1}',
        b'{"schema": 1, "command": [], "cwd": "", "key": {}, "levers": [5]}',
        b'{"schema": 1, "command": [], "cwd": "", "key": {}, "best": 5}',
        b'{"schema": 1, "command": 3, "cwd": 4, "key": 5}',
        b"[" * 100_000,
        b"\x80",
    ],
)
def test_a_broken_session_is_reported(flatout, job, content):
    (job / "session.json").write_bytes(content)
    done = flatout.here("report", str(job))
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "there is no session" in done.said[0]
    assert not (job / "report.html").exists()


def test_a_session_of_a_newer_flatout_is_shown(flatout, job):
    data = json.loads((job / "session.json").read_text())
    data["of tomorrow"] = {"x": 1}
    data["levers"][0]["of tomorrow"] = 1
    (job / "session.json").write_text(json.dumps(data))
    assert flatout.here("report", str(job)).code == 0
